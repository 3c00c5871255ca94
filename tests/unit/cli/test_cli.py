"""Arguments, output and errors of the command line."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from support.journals import GIB, MIB, MadeRun, at, batch, finished_run

from memlog._internal.distributed import Place
from memlog._version import __version__
from memlog.cli.main import cli
from memlog.cli.output import duration, number, one_line
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.events import Alert, Batch, End, Run
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.reports import encode, summarize


@pytest.fixture(autouse=True)
def _plain_environment(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLOG_DIR", str(tmp_path))
        patch.setenv("TZ", "UTC")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        time.tzset()
        yield
    time.tzset()


def memlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="memlog")


def said(*arguments: str) -> str:
    result = memlog(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def complaint(*arguments: str, code: int) -> str:
    """Return the one line that a failing command prints."""
    result = memlog(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("memlog: ")
    return line.removeprefix("memlog: ")


def surface(command: click.Command) -> dict[str, list[str]]:
    return {
        parameter.name or "": [*parameter.opts, *parameter.secondary_opts]
        for parameter in command.params
    }


def test_the_commands_and_their_options_are_frozen() -> None:
    assert surface(cli) == {"version": ["--version"]}
    assert {name: surface(command) for name, command in cli.commands.items()} == {
        "advise": {"run": ["run"], "as_json": ["--json"], "directory": ["--dir"]},
        "estimate": {
            "target": ["target"],
            "batches": ["--batch"],
            "lengths": ["--length"],
            "memory": ["--device"],
            "cpu": ["--cpu"],
            "as_json": ["--json"],
        },
        "compare": {
            "runs": ["runs"],
            "gates": ["--fail-if"],
            "allow_unfinished": ["--allow-unfinished"],
            "as_json": ["--json"],
            "directory": ["--dir"],
        },
        "completion": {"shell": ["shell"]},
        "demo": {"steps": ["--steps"], "backend": ["--backend"]},
        "open": {
            "what": ["what"],
            "browser": ["--no-browser"],
            "port": ["--port"],
            "directory": ["--dir"],
        },
        "pull": {
            "run": ["run"],
            "backend": ["--backend"],
            "kind": ["--kind"],
            "output": ["-o", "--output"],
            "trusted": ["--trust-address"],
            "force": ["--force"],
            "directory": ["--dir"],
        },
        "report": {"runs": ["runs"], "output": ["-o", "--output"], "directory": ["--dir"]},
        "run": {
            "backends": ["--backend"],
            "alerts": ["--alert"],
            "project": ["--project"],
            "name": ["--name"],
            "every": ["--every"],
            "layers": ["--layers"],
            "budget": ["--budget"],
            "directory": ["--dir"],
            "command": ["command"],
        },
        "runs": {"as_json": ["--json"], "directory": ["--dir"]},
        "show": {"run": ["run"], "as_json": ["--json"], "directory": ["--dir"]},
        "sync": {
            "run": ["run"],
            "backend": ["--to"],
            "timeout": ["--timeout"],
            "replace": ["--own-run"],
            "trusted": ["--trust-address"],
            "directory": ["--dir"],
        },
        "watch": {
            "run": ["run"],
            "once": ["--once"],
            "interval": ["--interval"],
            "as_json": ["--json"],
            "directory": ["--dir"],
        },
    }


def test_version_and_help() -> None:
    assert said("--version") == f"memlog, version {__version__}\n"
    assert said("-h") == said("--help")
    for name in cli.commands:
        assert said(name, "-h").startswith(f"Usage: memlog {name} ")


def test_wrong_use_is_explained_without_a_traceback() -> None:
    for arguments in (
        ("show",),
        ("shw",),
        ("show", "--jsn", "latest"),
        ("sync", "x", "--timeout", "-1"),
    ):
        result = memlog(*arguments)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert "Traceback" not in result.output


# runs


def test_runs_are_listed_newest_last(tmp_path: Path) -> None:
    UploadState(backend="mlflow", stage="done", delivered=1234).save(finished_run(tmp_path))
    failed = MadeRun(tmp_path, "zzzz2222").write(
        Run(at(0), None, None, ("mlflow",), {}), batch(0, GIB), End(at(1), "failed")
    )
    UploadState(
        backend="mlflow", stage="unreachable", delivered=7, problem="http://me:secret@host is down"
    ).save(failed.closed())
    MadeRun(tmp_path, "zzzz3333", alive=True).closed()
    assert said("runs").splitlines() == [
        "id        name       status    begun             steps  host peak  device peak  delivered",
        "k7m2xq9a  gpt-small  finished  2026-09-21 14:13    200    1.2 GiB      1.1 GiB"
        "  mlflow 1,234 ✓",
        "zzzz2222  -          failed    2026-09-21 14:13      1    1.0 GiB            -"
        "  mlflow 7, rest waiting",
        "zzzz3333  -          running   2026-09-21 14:13      0          -            -  -",
        "zzzz2222: mlflow: http://host is down; `memlog sync zzzz2222` delivers the rest",
    ]


def test_a_run_of_which_nothing_is_delivered_and_a_long_name(tmp_path: Path) -> None:
    """Undelivered points are not shown as 0, and a long name takes no room from other columns."""
    waiting = Run(at(0), "n" * 5000, None, ("mlflow",), {})
    MadeRun(tmp_path).write(waiting, batch(0, GIB), End(at(1), "finished")).closed()
    finished_run(tmp_path, "zzzz2222")
    heading, *lines = said("runs").splitlines()
    assert lines[0].endswith("  mlflow all waiting")
    assert max(len(line) for line in (heading, *lines)) < 1200
    assert json.loads(said("runs", "--json"))["runs"][0]["name"] == "n" * 5000


def test_an_unnamed_run_has_its_trackers_names(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(Run(at(0), None, None, ("mlflow",), {}))
    for index, name in enumerate(["brave-cat-1", "brave-cat-2", None]):
        made.bound("mlflow", f"run{index}", "http://host", name).write(batch(index, GIB))
    run = made.closed()
    line = said("runs").splitlines()[1]
    assert line.startswith(f"{run.id}  brave-cat-1, brave-cat-2  ")
    listed = json.loads(said("runs", "--json"))["runs"][0]
    assert listed["name"] is None
    names = [tracked["name"] for tracked in listed["delivered"]["mlflow"]["runs"]]
    assert names == ["brave-cat-1", "brave-cat-2", None]
    shown = said("show", "latest")
    assert "run run0 'brave-cat-1' at http://host" in shown
    assert "run run2 at http://host" in shown


def test_a_delivery_problem_has_a_remedy(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(Run(at(0), None, None, ("mlflow",), {})).closed()
    away = "MLflow at http://h:1 does not answer (connection refused)"
    UploadState(backend="mlflow", stage="unreachable", problem=away).save(run)
    told = f"{run.id}: mlflow: {away}; `memlog sync {run.id}` delivers the rest"
    assert told in said("runs").splitlines()


def test_runs_as_json(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    UploadState(backend="mlflow", stage="done", delivered=1234).save(run)
    document = json.loads(said("runs", "--json"))
    assert document["schema"] == 1
    [line] = document["runs"]
    delivered = line.pop("delivered")
    assert line == {
        "id": "k7m2xq9a",
        "name": "gpt-small",
        "project": "language",
        "directory": str(run.path),
        "begun": "2026-09-21T14:13:20.000Z",
        "status": "finished",
        "steps": 200,
        "host_peak_bytes": GIB + 199 * MIB,
        "device_peak_bytes": GIB + 120 * MIB,
    }
    assert delivered["mlflow"]["points"] == 1234


def test_no_runs_says_how_to_get_one(tmp_path: Path) -> None:
    for arguments in (("runs",), ("show", "latest"), ("sync", "latest")):
        line = complaint(*arguments, code=1)
        assert line.startswith(f"there are no runs in {tmp_path}: train with memlog.init()")
    assert json.loads(said("runs", "--json")) == {"schema": 1, "runs": []}


def test_the_folder_is_the_one_that_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path / "elsewhere")
    assert "k7m2xq9a" in said("runs", "--dir", str(tmp_path / "elsewhere"))
    assert "k7m2xq9a" in said("show", "latest", "--dir", str(tmp_path / "elsewhere"))
    assert str(tmp_path / "nowhere") in complaint(
        "runs", "--dir", str(tmp_path / "nowhere"), code=1
    )


# show


def test_show_as_json_is_the_summary(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    state = UploadState(backend="mlflow", stage="done", delivered=1234, joined=["3f2a9c"])
    state.save(run)
    assert said("show", "k7", "--json").encode() == encode(summarize(run)) + b"\n"


def test_every_commands_help_can_be_read() -> None:
    overview = said("--help")
    assert "..." not in overview.partition("Commands:")[2]
    for name in cli.commands:
        help_text = said(name, "--help")
        assert "\\b" not in help_text
        assert "\b" not in help_text
    lines = said("run", "--help").splitlines()
    assert "  memlog run -- bash job.sh" in lines
    assert "wandb" in said("run", "--help")


def test_singular_and_plural(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(0, GIB)).closed()
    assert ", 1 step in " in said("show", "latest")
    assert "no run is named: pass an id" in CliRunner().invoke(cli, ["show", ""]).output


def test_show_names_the_steps_of_a_resumed_run(tmp_path: Path) -> None:
    MadeRun(tmp_path).write(batch(100_000, GIB), batch(100_001, GIB)).closed()
    assert ", steps 100,000 to 100,001 in " in said("show", "latest")


def test_show_prints_everything_on_one_page(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    UploadState(
        backend="mlflow",
        stage="done",
        delivered=1234,
        joined=["3f2a9c"],
        dropped={"rejected: memory/x": 3},
    ).save(run)
    page = said("show", "latest")
    assert page.splitlines()[0] == "No growth: peak 1.1 GiB of 80.0 GiB, steady since step 0."
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
    page = said("show", "latest")
    for heading in ("Alerts", "Artifacts", "evaluation", "epoch"):
        assert heading not in page
    assert "  dropped    none" in page
    assert "  overhead   unknown" in page
    assert "  host.tree  unknown" in page
    assert "to no tracker; `memlog sync k7m2xq9a --to mlflow` delivers it to one" in page


def test_latest_is_the_lowest_rank_of_a_training(tmp_path: Path) -> None:
    for rank in range(2):
        made = MadeRun(tmp_path, f"rank{rank}").ranked(Place(rank, 2, "a"), begun=rank)
        made.write(batch(0, GIB)).closed()
    publish_afterwards(RunDirectory(tmp_path / "rank0"))
    assert "run rank0  " in said("show", "latest")
    page = " ".join(said("show", "rank1").split())
    assert "with run rank0, which has the smallest, mean and largest memory of all ranks" in page


def test_show_says_how_to_deliver_what_is_left(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(Run(at(0), None, None, ("mlflow",), {}))
    UploadState(backend="mlflow", stage="unreachable", problem="it is down").save(made.closed())
    page = said("show", "latest")
    assert "  mlflow  nothing delivered, unreachable: it is down" in page
    assert "`memlog sync k7m2xq9a` delivers the rest" in page


def test_a_beginning_must_be_of_one_run_only(tmp_path: Path) -> None:
    for name in ("abc23", "abd45"):
        MadeRun(tmp_path, name).write(batch(0, GIB)).closed()
    assert "run abc23 " in said("show", "abc")
    assert "run abd45 " in said("show", "abd45")
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
    for text in (said("runs"), said("show", "latest")):
        assert "name\N{REPLACEMENT CHARACTER}[bold]:boom:" in text
        assert all(char.isprintable() or char == "\n" for char in text)


def test_a_piped_page_has_no_colours_and_cuts_nothing(tmp_path: Path) -> None:
    name = "a name as long as the day " * 8
    MadeRun(tmp_path).write(Run(at(0), name, None, (), {})).closed()
    for text in (said("runs"), said("show", "latest")):
        assert "\x1b" not in text
        assert name.strip() in text
        assert not any(line.endswith(" ") for line in text.splitlines())


def test_extreme_numbers_are_shown(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(Batch(10**17, 10**15, 2**62, -5, None)).closed()
    assert summarize(run).run.newest_event == "5138-11-16T09:46:40.000Z"
    said("runs")
    said("show", "latest")
    json.loads(said("show", "latest", "--json"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3599.9, "1 h 0 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00412, "0.00412"),
        (2.5, "2.5"),
        (-3.14159, "-3.142"),
        (12345.67, "12,345.7"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_a_message_is_one_line() -> None:
    assert one_line("first\nsecond\tthird") == "first second\N{REPLACEMENT CHARACTER}third"
