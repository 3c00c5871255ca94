"""``memlog watch``: the page, one line a reading, and the JSON document, of journals that grow meanwhile."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.commands import complaint, memlog, output_of
from support.journals import BEGUN_US, GIB, MIB, MadeRun, at, batch, bury, cuda

from memlog._internal.processes import RankPosition
from memlog.events import Alert, Device, End, Finding, Loss, Parameters, Run, Sample
from memlog.journal import JournalFile
from memlog.reports.accumulator import History
from memlog.reports.live import LiveState


@pytest.fixture(autouse=True)
def _folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """Calls to make in each pause of the command, in order; no pause takes time."""
    happens: list[Callable[[], object]] = []
    clock = [time.monotonic()]

    def pause(seconds: float) -> None:
        clock[0] += seconds
        if happens:
            happens.pop(0)()

    monkeypatch.setattr("memlog.cli.watch.time.sleep", pause)
    monkeypatch.setattr("memlog.cli.watch.time.monotonic", lambda: clock[0])
    yield happens
    assert not happens


def shown(*arguments: str) -> str:
    return output_of("watch", *arguments)


def training(root: Path, run_id: str = "k7m2xq9a", rank: int | None = None) -> MadeRun:
    """A run of 200 steps on one device that is still training."""
    made = MadeRun(root, run_id, alive=True)
    if rank is not None:
        made.ranked(RankPosition(rank, 2, "a training"))
    made.write(
        Run(at(0), "gpt-small", None, ("mlflow",), {}),
        Parameters(at(0.1), {}),
        Device(at(0.2), "cuda0", "NVIDIA H100 80GB HBM3", 80 * GIB),
    )
    made.bound("mlflow", "3f2a9c", "http://tracker:5000", "quiet-bear-42")
    for step in range(200):
        made.write(batch(step, GIB + step * MIB, cuda(50 * GIB, (60 + (rank or 0)) * GIB)))
    return made.sampled(Sample(at(19), 190, 2 * GIB, 3, 8 * GIB, GIB, None, host_limit=16 * GIB))


VERDICT = (
    "`history`, a list, gains one tensor per step. Memory grows by 10.0 MiB a step since step 12, and "
    "memory runs out at step 1,900 to 2,150 (80.0 GiB)."
)


def finding() -> Finding:
    return Finding(
        time_us=at(20),
        step=200,
        kind="kept_graph",
        title="`history`, a list, gains one tensor per step",
        where="history",
        since_step=12,
        rate=10.0 * MIB,
        forecast=(1_900, 2_150),
        limit=80 * GIB,
        remedy="Keep only its number.",
    )


def test_the_page_has_bars_growth_alerts_and_where_the_run_is(tmp_path: Path) -> None:
    made = training(tmp_path)
    made.write(
        Loss(at(20), 199, 2.31),
        finding(),
        Alert(at(20), 150, "warning", "device.allocated > 50%", "cuda0.allocated is 50.0 GiB", ""),
        Alert(at(20), 200, "warning", "memlog: kept_graph", VERDICT, ""),
    ).closed()
    lines = shown("--once").splitlines()
    assert lines[0] == "run k7m2xq9a  running  gpt-small"
    assert lines[1] == "step 199, loss 2.31, 10 steps/s, after 20.0 s"
    assert [line.split()[:9] for line in lines if line.startswith(("host", "cuda"))] == [
        ["host.rss", "1.2", "GiB", "1.2", "GiB", "16.0", "GiB", "██" + "·" * 28, "7%"],
        ["host.tree", "2.0", "GiB", "2.0", "GiB", "16.0", "GiB", "████" + "·" * 26, "12%"],
        ["cuda0", "50.0", "GiB", "60.0", "GiB", "80.0", "GiB", "█" * 19 + "··▌" + "·" * 8, "75%"],
    ]
    assert lines[5].split() == ["▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▆▇▇▇▇▇███"]
    assert [line for line in lines if "history" in line] == [VERDICT]
    assert "what to do: Keep only its number." in lines
    assert "step 150  warning  cuda0.allocated is 50.0 GiB" in lines


def test_the_document_names_every_figure(tmp_path: Path) -> None:
    training(tmp_path).write(finding()).closed()
    text = shown("--once", "--json")
    state = msgspec.json.decode(text, type=LiveState)
    assert json.loads(text).keys() == set(LiveState.__struct_fields__)
    assert (state.run, state.status, state.step) == ("k7m2xq9a", "running", 199)
    assert state.names == ["gpt-small", "quiet-bear-42", "3f2a9c"]
    assert state.steps_per_s == pytest.approx(10)
    assert state.newest_event == "2026-09-21T14:13:40.000Z"
    host, tree, device = state.memory
    assert (host.name, tree.name, device.name) == ("host.rss", "host.tree", "cuda0")
    assert (host.current_bytes, host.limit_bytes) == (GIB + 199 * MIB, 16 * GIB)
    assert tree.current_bytes == 2 * GIB
    assert (device.current_bytes, device.peak_bytes) == (50 * GIB, 60 * GIB)
    assert (device.limit_bytes, device.peak_step) == (80 * GIB, 0)
    assert len(host.history_bytes) <= 120
    assert host.history_bytes == sorted(host.history_bytes)
    assert host.history_bytes[-1] == GIB + 199 * MIB
    assert state.findings[0].rate == 10 * MIB
    assert state.ranks == []


def test_a_line_for_each_reading_until_the_run_ends(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    made = training(tmp_path)
    meanwhile += [
        lambda: made.write(batch(200, 2 * GIB, cuda(51 * GIB, 70 * GIB))),
        lambda: made.write(End(at(22), "finished")),
    ]
    first, second, third, end = shown().splitlines()
    assert first == (
        "k7m2xq9a step 199, 10 steps/s, after 19.9 s: host.rss 1.2 GiB, peak 1.2 GiB of 16.0 GiB; "
        "host.tree 2.0 GiB, peak 2.0 GiB of 16.0 GiB; cuda0 50.0 GiB, peak 60.0 GiB of 80.0 GiB"
    )
    assert second.startswith("k7m2xq9a step 200, 10 steps/s, after 20.0 s: host.rss 2.0 GiB")
    assert second.endswith("cuda0 51.0 GiB, peak 70.0 GiB of 80.0 GiB")
    assert third.startswith("k7m2xq9a step 200, after 22.0 s: ")
    assert end == "run k7m2xq9a has finished: `memlog show k7m2xq9a`"


def test_each_event_is_read_once(
    tmp_path: Path, meanwhile: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    decode = JournalFile._decode

    def counted(self: JournalFile, line: bytes) -> object:
        record = decode(self, line)
        if record is not None and isinstance(record.event, type(batch(0, GIB))):
            read.append(record.event.step)
        return record

    made = training(tmp_path)
    meanwhile += [
        lambda: monkeypatch.setattr(JournalFile, "_decode", counted),
        lambda: made.write(batch(200, GIB)),
        lambda: made.write(batch(201, GIB), End(at(22), "finished")),
    ]
    shown("--json")
    assert read == [200, 201]


def test_a_document_on_each_line(tmp_path: Path, meanwhile: list[Callable[[], object]]) -> None:
    made = training(tmp_path)
    meanwhile += [lambda: made.write(End(at(22), "failed"))]
    states = [msgspec.json.decode(line, type=LiveState) for line in shown("--json").splitlines()]
    assert [state.status for state in states] == ["running", "failed"]


def test_it_ends_when_the_process_is_gone(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    made = training(tmp_path)
    meanwhile += [lambda: bury(made.directory), *[lambda: None] * 15]
    end = shown().splitlines()[-1]
    assert end == "run k7m2xq9a was killed, or its process is gone: `memlog show k7m2xq9a`"


def test_without_a_name_the_newest_run_that_trains_is_shown(tmp_path: Path) -> None:
    training(tmp_path, "aaaa2222").closed()
    MadeRun(tmp_path, "bbbb3333").write(batch(0, GIB)).closed()
    MadeRun(tmp_path, "cccc4444", alive=True).write(End(at(1), "finished")).closed()
    assert shown("--once").startswith("run aaaa2222  running")
    assert shown("--once", "bbbb").splitlines()[0] == "run bbbb3333  killed"
    assert "run cccc4444 has finished: `memlog show cccc4444`" in shown("cccc4444")


def test_without_a_run_that_trains_one_line_says_so(tmp_path: Path) -> None:
    assert complaint("watch").startswith(f"no run in {tmp_path} is training now; `memlog")
    MadeRun(tmp_path).write(batch(0, GIB)).closed()
    assert complaint("watch") == (
        f"no run in {tmp_path} is training now, the newest is k7m2xq9a: "
        "`memlog show k7m2xq9a`; `memlog watch RUN` shows one that has ended"
    )


def test_a_folder_that_is_deleted_meanwhile_is_one_line(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    made = training(tmp_path)
    meanwhile += [lambda: shutil.rmtree(made.directory.path)]
    result = memlog("watch")
    assert result.exit_code == 1
    assert result.stderr == (
        f"memlog: the folder {made.directory.path} is gone: `memlog runs` lists what there is\n"
    )


def test_the_ranks_of_one_training_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path, "rank0aaa", 0).closed()
    training(tmp_path, "rank1bbb", 1).closed()
    training(tmp_path, "alone222").closed()
    monkeypatch.setattr("support.journals.BEGUN_US", BEGUN_US + 3600 * 10**6)
    training(tmp_path, "later333", 1).closed()
    rows = [" ".join(line.split()) for line in shown("--once", "rank0").splitlines()]
    assert rows[-2:] == [
        "0 rank0aaa running 199 cuda0 50.0 GiB 60.0 GiB 80.0 GiB 0",
        "1 rank1bbb running 199 cuda0 50.0 GiB 61.0 GiB 80.0 GiB 0",
    ]
    assert "rank1bbb" not in shown("--once", "alone222")


def test_a_run_without_data_is_no_error(tmp_path: Path) -> None:
    MadeRun(tmp_path, alive=True).closed()
    assert shown("--once").splitlines()[:2] == ["run k7m2xq9a  running", "no step yet"]


def test_ctrl_c_ends_the_watching_alone(
    tmp_path: Path, meanwhile: list[Callable[[], object]]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    training(tmp_path)
    meanwhile += [interrupt]
    result = memlog("watch")
    assert (result.exit_code, result.stderr) == (0, "memlog: no longer watched, the run goes on\n")


@pytest.mark.parametrize("count", [1, 119, 240, 241, 5_000])
def test_a_long_history_keeps_its_highest_values_in_bounded_memory(count: int) -> None:
    history = History()
    for value in range(count):
        history.add(1_000_000 if value == count // 3 else value)
    values = history.values()
    assert len(values) <= 120
    assert len(history._highest) <= 240
    assert max(values) == 1_000_000
    rising = [value for value in values if value < 1_000_000]
    assert rising == sorted(rising)
    assert count == 1 or values[-1] == count - 1
