"""Output of `memlog runs`."""

import json
from pathlib import Path

import pytest
from support.commands import complaint, output_of
from support.journals import GIB, MIB, MadeRun, at, batch, finished_run

from memlog.events import End, Run
from memlog.journal.delivery_state import UploadState

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_runs_are_listed_newest_last(tmp_path: Path) -> None:
    UploadState(backend="mlflow", stage="done", delivered=1234).save(finished_run(tmp_path))
    failed = MadeRun(tmp_path, "zzzz2222").write(
        Run(at(0), None, None, ("mlflow",), {}), batch(0, GIB), End(at(1), "failed")
    )
    UploadState(
        backend="mlflow", stage="unreachable", delivered=7, problem="http://me:secret@host is down"
    ).save(failed.closed())
    MadeRun(tmp_path, "zzzz3333", alive=True).closed()
    assert output_of("runs").splitlines() == [
        "id        name       status    begun             steps  host peak  device peak  delivered",
        "k7m2xq9a  gpt-small  finished  2026-09-21 14:13    200    1.2 GiB      1.1 GiB"
        "  mlflow 1,234 ✓",
        "zzzz2222  -          failed    2026-09-21 14:13      1    1.0 GiB            -"
        "  mlflow 7, rest waiting",
        "zzzz3333  -          running   2026-09-21 14:13      0          -            -  -",
        "zzzz2222: mlflow: http://host is down; `memlog sync zzzz2222` delivers the rest",
    ]


def test_a_run_of_which_nothing_is_delivered_and_a_long_name(tmp_path: Path) -> None:
    """Undelivered points are not shown as 0. A long name leaves the other columns their width."""
    waiting = Run(at(0), "n" * 5000, None, ("mlflow",), {})
    MadeRun(tmp_path).write(waiting, batch(0, GIB), End(at(1), "finished")).closed()
    finished_run(tmp_path, "zzzz2222")
    heading, *lines = output_of("runs").splitlines()
    assert lines[0].endswith("  mlflow all waiting")
    assert max(len(line) for line in (heading, *lines)) < 1200
    assert json.loads(output_of("runs", "--json"))["runs"][0]["name"] == "n" * 5000


def test_an_unnamed_run_has_its_trackers_names(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(Run(at(0), None, None, ("mlflow",), {}))
    for index, name in enumerate(["brave-cat-1", "brave-cat-2", None]):
        made.bound("mlflow", f"run{index}", "http://host", name).write(batch(index, GIB))
    run = made.closed()
    line = output_of("runs").splitlines()[1]
    assert line.startswith(f"{run.id}  brave-cat-1, brave-cat-2  ")
    listed = json.loads(output_of("runs", "--json"))["runs"][0]
    assert listed["name"] is None
    names = [tracked["name"] for tracked in listed["delivered"]["mlflow"]["runs"]]
    assert names == ["brave-cat-1", "brave-cat-2", None]
    shown = output_of("show", "latest", "--all")
    assert "run run0 'brave-cat-1' at http://host" in shown
    assert "run run2 at http://host" in shown


def test_runs_as_json(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    UploadState(backend="mlflow", stage="done", delivered=1234).save(run)
    document = json.loads(output_of("runs", "--json"))
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
    assert json.loads(output_of("runs", "--json")) == {"schema": 1, "runs": []}


def test_the_folder_is_the_one_that_is_named(tmp_path: Path) -> None:
    finished_run(tmp_path / "elsewhere")
    assert "k7m2xq9a" in output_of("runs", "--dir", str(tmp_path / "elsewhere"))
    assert "k7m2xq9a" in output_of("show", "latest", "--dir", str(tmp_path / "elsewhere"))
    assert str(tmp_path / "nowhere") in complaint(
        "runs", "--dir", str(tmp_path / "nowhere"), code=1
    )
