"""Output of `memlog show`."""

import json
import re
from pathlib import Path

import pytest
from support.commands import complaint, output_of
from support.journals import GIB, MadeRun, at, batch, cuda, finished_run

from memlog._internal.processes import RankPosition
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.events import CUT, Alert, Batch, Device, DeviceUse, Health, Run, Sample, Trace
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.reports import encode, summarize

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_show_as_json_is_the_summary(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    state = UploadState(backend="mlflow", stage="done", delivered=1234, joined=["3f2a9c"])
    state.save(run)
    assert output_of("show", "k7", "--json").encode() == encode(summarize(run)) + b"\n"


def test_singular_and_plural(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(0, GIB)).closed()
    assert ", 1 step in " in output_of("show", "latest")
    assert complaint("show", "").startswith("no run is named: pass an id")


def test_show_names_the_steps_of_a_resumed_run(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(100_000, GIB), batch(100_001, GIB)).closed()
    assert ", 2 steps (100,000 to 100,001) in " in output_of("show", "latest")


def test_show_prints_everything_on_one_page(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    UploadState(
        backend="mlflow",
        stage="done",
        delivered=1234,
        joined=["3f2a9c"],
        dropped={"rejected: memory/x": 3},
    ).save(run)
    page = output_of("show", "latest", "--all")
    assert page.splitlines()[0] == (
        "Unsure: host memory rose by 198.0 MiB in 200 steps, and the cause was not searched: peak 1.2 GiB of "
        "16.0 GiB."
    )
    assert page.splitlines()[2] == "run k7m2xq9a  finished  gpt-small"
    for line in (
        "  begun       2026-09-21 14:13, 200 steps in 21.0 s",
        "  cuda0       NVIDIA H100 80GB HBM3, 80.0 GiB",
        "  parameters  model=GPT, python=3.11.4, torch=2.13.0",
        "  cuda0.allocated  1.1 GiB (1%)  exact                  step 120",
        "  host.tree             3.0 GiB  sampled (lower bound)",
        "Metrics of steps 0 to 199",
        "  memory/cuda0/peak_mib       MiB   1,144.0  1,024.0  1,144.0",
        "  memlog/overhead_ms          ms      0.012    0.012    0.012",
        "Metrics of evaluations 0 to 1",
        "Metrics of epoch 0",
        "  step 150  warning  host.rss > 1 GiB  Host memory: rss is 1.1 GiB",
        "  flame graph  flamegraph  120.6 KiB  artifacts/flame.svg",
        "  mlflow  1,234 points ✓",
        "          run 3f2a9c at http://tracker:5000",
        "  dropped    journal_write 2, mlflow: rejected: memory/x 3",
        "  faults     reading cuda0: OSError 1",
        "  overhead   0.013 ms a step, 2.5 ms in all",
    ):
        assert line in page.splitlines()
    assert re.search(r"published  \d+ events", page)


def test_show_leaves_out_empty_sections(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(0, GIB)).closed()
    page = output_of("show", "latest", "--all")
    for heading in ("Alerts", "Artifacts", "evaluation", "epoch"):
        assert heading not in page
    assert "  dropped    none" in page
    assert "  overhead   unknown" in page
    assert "  host.tree  unknown" in page
    assert "to no tracker; `memlog sync k7m2xq9a --to mlflow` delivers it to one" in page


def test_show_adds_the_time_of_traced_steps(tmp_path: Path) -> None:
    cost = Health(at(1), 0, 0.5, 100.0, {}, {}, tracing_ms=1500.0, tracing_set_up_ms=500.0)
    traced = Trace(at(1), 0, "dispatch", True, GIB, {}, (), 0)
    MadeRun(tmp_path).write(traced, batch(0, GIB), cost).closed()
    (line,) = [one for one in output_of("show", "latest").splitlines() if "overhead" in one]
    assert line.endswith("100.0 ms in all, and 2.0 s for traced steps; nothing was lost")


def test_show_tells_why_a_trace_covers_a_part_of_its_step(tmp_path: Path) -> None:
    part = Trace(at(1), 0, "dispatch", False, GIB, {}, (), 0, cut=True)
    cost = Health(at(1), 0, 0.5, 100.0, {}, {}, tracing_set_up_ms=60.0)
    MadeRun(tmp_path).write(part, batch(0, GIB), cost).closed()
    (line,) = [each for each in output_of("show", "latest").splitlines() if "in tensors" in each]
    assert (
        "1.0 GiB in tensors (lower bound: the budget was used up within the step), step 0" in line
    )
    assert CUT.replace("`", "") in output_of("show", "latest", "--all")
    document = json.loads(output_of("show", "latest", "--json"))
    assert document["traced"]["worst_cut"] == CUT
    page = tmp_path / "page.html"
    output_of("report", "latest", "-o", str(page))
    assert CUT.split("`")[0] in page.read_text()


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_show_tells_why_no_step_was_traced(tmp_path: Path, options: tuple[str, ...]) -> None:
    waits = Health(at(1), 0, 0.5, 100.0, {}, {}, untraced="it allows that after 60 s")
    MadeRun(tmp_path).write(batch(0, GIB), waits).closed()
    assert "it allows that after 60 s" in output_of("show", "latest", *options)


def test_other_commands_give_the_same_reason(tmp_path: Path) -> None:
    waits = Health(at(1), 0, 0.5, 100.0, {}, {}, untraced="it allows that after 60 s")
    MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(200)), waits).closed()
    for command in ("advise", "open"):
        told = complaint(command, "latest")
        assert told.endswith(": it allows that after 60 s")
        assert "layers=True" not in told
    brief = output_of("show", "latest", "--brief")
    assert "memlog run --layers" not in brief
    assert "tells why no step was traced" in brief


def test_latest_is_the_lowest_rank_of_a_training(tmp_path: Path) -> None:
    for rank in range(2):
        made = MadeRun(tmp_path, f"rank{rank}").ranked(RankPosition(rank, 2, "a"), begun=rank)
        made.write(batch(0, GIB)).closed()
    publish_afterwards(RunDirectory(tmp_path / "rank0"))
    assert "run rank0  " in output_of("show", "latest")
    page = " ".join(output_of("show", "rank1", "--all").split())
    assert "with run rank0, which has the smallest, mean and largest memory of all ranks" in page


def test_show_says_how_to_deliver_what_is_left(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(Run(at(0), None, None, ("mlflow",), {}))
    UploadState(backend="mlflow", stage="unreachable", problem="it is down").save(made.closed())
    page = output_of("show", "latest")
    assert "  mlflow  nothing delivered, unreachable: it is down" in page
    assert "`memlog sync k7m2xq9a` delivers the rest" in page


def test_a_beginning_must_be_of_one_run_only(tmp_path: Path) -> None:
    for name in ("abc23", "abd45"):
        MadeRun(tmp_path, name).write(batch(0, GIB)).closed()
    assert "run abc23 " in output_of("show", "abc")
    assert "run abd45 " in output_of("show", "abd45")
    several = complaint("show", "ab", code=1)
    assert re.fullmatch(
        r"2 runs begin with 'ab' \(abd45 of 2026-.*, abc23 of 2026-.*\): name more of the id",
        several,
    )
    assert complaint("show", "xy", code=1).endswith(
        "is called 'xy' or begins with it: `memlog runs` lists them"
    )
    assert "no run" in complaint("show", "../abc23", code=1)


def test_a_journal_cannot_control_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x07\r\nname\u202e[bold]:boom:"
    MadeRun(tmp_path).write(
        Run(at(0), evil, evil, (evil,), {}), Alert(at(1), 1, "error", evil, evil, evil)
    ).closed()
    for text in (output_of("runs"), output_of("show", "latest", "--all")):
        assert "name\N{REPLACEMENT CHARACTER}[bold]:boom:" in text
        assert all(char.isprintable() or char == "\n" for char in text)


def test_a_piped_page_has_no_colours_and_cuts_nothing(tmp_path: Path) -> None:
    name = "a name as long as the day " * 8
    MadeRun(tmp_path).write(Run(at(0), name, None, (), {})).closed()
    for text in (output_of("runs"), output_of("show", "latest")):
        assert "\x1b" not in text
        assert name.strip() in text
        assert not any(line.endswith(" ") for line in text.splitlines())


def test_extreme_numbers_are_shown(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(Batch(10**17, 10**15, 2**62, -5, None)).closed()
    assert summarize(run).run.newest_event == "5138-11-16T09:46:40.000Z"
    output_of("runs")
    output_of("show", "latest")
    json.loads(output_of("show", "latest", "--json"))


@pytest.mark.parametrize(("used", "shown"), [(4 * GIB, True), (3 * GIB, False)])
def test_other_processes_on_a_device_are_shown_from_a_twentieth_of_it_on(
    tmp_path: Path, used: int, shown: bool
) -> None:
    use = DeviceUse("cuda0", 40 * GIB, 30 * GIB, used)
    made = MadeRun(tmp_path).write(
        Device(at(0), "cuda0", "H100", 80 * GIB), batch(0, GIB, cuda(GIB))
    )
    made.sampled(Sample(at(1), 0, None, None, None, None, None, devices=(use,)))
    made.closed()
    found = "cuda0.other_processes" in output_of("show", "latest")
    assert found == shown
    if shown:
        assert "cuda0.other_processes  4.0 GiB (5%)" in output_of("show", "latest", "--all")
