"""Journals and stores of older code give the same documents, points, rows and files."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support import child
from support.mlflow_server import sqlite_store
from support.wandb_file import WandbFile, find_runs, read_only_run, read_run

pytestmark = pytest.mark.integration
WRITTEN = Path(__file__).parents[2] / "data" / "runs-of-0.1"
FIRST, SECOND = "jkpf99jq", "vnnbfssx"
KILLED = "x9333si6"
"""The user's W&B run ``first000`` has steps 0 to 9. SIGKILL ended ``second00`` after step 15 of the session.

The report that the journal lists is left out, because it is large.
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "runs", tmp_path / "memlog_runs")
    return tmp_path


def expected(name: str) -> Any:
    return json.loads((WRITTEN / f"{name}.json").read_text(encoding="utf-8"))


ADDED = (
    "first_step",
    "last_step",
    "outcome",
    "host_limit_bytes",
    "cgroup_limit_bytes",
    "failed_rank",
    "survived_failures",
    "survived_batch_sizes",
    "survived_first_step",
    "survived_last_step",
    "saving",
    "saving_is_partial",
    "longest_batch",
    "failed_at",
)
"""Keys that newer code has added to the document of `memlog show --json`."""
OF_TRACES = ("worst_device", "worst_cut", "untraced")
"""Keys that newer code has added to its object `traced`."""


@pytest.mark.parametrize("run", [FIRST, SECOND])
def test_show_gives_the_same_document(runs: Path, run: str) -> None:
    document = json.loads(child.memlog("show", run, "--json", directory=runs))
    del document["run"]["directory"]  # the folder of the copy
    assert document.pop("findings") == []  # newer code has added these four keys
    assert document.pop("phases") == {}
    assert document.pop("largest_step") is None
    assert document.pop("verdict").startswith(("No growth", "Too few steps"))
    assert [document.pop(name) for name in ADDED][:3] == [0, 39, "steady"]
    assert not any(peak.pop("after_step") for peak in document["peaks"].values())
    assert [document["traced"].pop(name) for name in OF_TRACES] == [None] * 3
    assert document == expected(f"show-{run}")


def test_compare_gives_the_same_document(runs: Path) -> None:
    document = json.loads(child.memlog("compare", FIRST, SECOND, "--json", directory=runs))
    assert document == expected("compare")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_sync_gives_the_same_points(runs: Path) -> None:
    address = sqlite_store(runs)
    child.memlog(*("sync", FIRST, "--to", "mlflow"), directory=runs, MLFLOW_TRACKING_URI=address)
    client = client_of(runs)
    run = only_run(client)
    synced = {"metrics": points_of(client, run), "params": dict(run.data.params)}
    assert synced == expected("points")


@pytest.fixture
def stored(runs: Path) -> Path:
    """Older runs with their MLflow store and their delivery state, as they were after ``memlog sync``."""
    store = WRITTEN / "mlflow-store"
    shutil.copytree(store / "mlruns", runs / "mlruns")
    delivery = runs / "memlog_runs" / FIRST / "delivery"
    delivery.mkdir()
    with closing(sqlite3.connect(runs / "mlflow.db")) as database:
        database.executescript(with_root(store / "mlflow.sql", runs))
    (delivery / "mlflow.json").write_text(with_root(store / "delivery" / "mlflow.json", runs))
    return runs


def with_root(path: Path, root: Path) -> str:
    return path.read_text(encoding="utf-8").replace("{root}", str(root))


def points_of(client: MlflowClient, run: Any) -> dict[str, list[list[float]]]:
    history = client.get_metric_history
    return {
        name: [[metric.step, metric.value] for metric in history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def only_run(client: MlflowClient) -> Any:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    [run] = client.search_runs(experiments)
    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_an_older_store_gives_its_files_and_gets_no_point_twice(stored: Path) -> None:
    client = client_of(stored)
    runs = {FIRST: "by-its-id", only_run(client).info.run_id: "by-mlflows"}
    pulls = [("pull", run, "--backend", "mlflow", "-o", out) for run, out in runs.items()]
    address = {"MLFLOW_TRACKING_URI": f"sqlite:///{stored}/mlflow.db"}
    child.commands(*pulls, ("sync", FIRST, "--to", "mlflow"), directory=stored, **address)
    note = WRITTEN / "runs" / FIRST / "artifacts" / "note.txt"
    for out in runs.values():
        assert (stored / out / "note.txt").read_bytes() == note.read_bytes()
    assert points_of(client, only_run(client)) == expected("points")["metrics"]


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def test_sync_gives_wandb_the_same_rows(runs: Path) -> None:
    child.memlog("sync", SECOND, "--to", "wandb", directory=runs, WANDB_MODE="offline")
    run = read_only_run(runs / "wandb")
    rows = [{name: row[name] for name in row if name != "_runtime"} for row in run.rows]
    assert {"rows": rows, "alerts": run.alerts, "config": run.config} == expected("wandb")


@pytest.fixture
def killed(runs: Path) -> Path:
    """Older runs, with a journal that has not changed lately: a run of another host then counts as ended."""
    for path in (runs / "memlog_runs" / KILLED).glob("*.jsonl"):
        os.utime(path, (0, 0))
    return runs


def test_show_reads_what_an_older_trainer_has_written_to_wandb(killed: Path) -> None:
    output = json.loads(child.memlog("show", KILLED, "--json", directory=killed))
    del output["run"]["directory"]  # the folder of the copy
    wanted = expected(f"show-{KILLED}")
    assert [output.pop(name) for name in ADDED][:3] == [0, 15, "unsure"]
    assert not any(peak.pop("after_step") for peak in output["peaks"].values())
    assert [output["traced"].pop(name) for name in OF_TRACES] == [None] * 3
    assert output.pop("verdict").startswith("Ended unexpectedly after step 15. Unsure: ")
    del wanted["verdict"]  # newer code names what is in doubt
    # In newer code, a run ends with its own last event, not with a later report on it.
    assert output["run"].pop("duration_s") < wanted["run"].pop("duration_s")
    for document in (output, wanted):  # newer code ends the line in other words
        problem = document["health"]["delivered"]["wandb"].pop("problem")
        assert problem.startswith(
            "the trainer's process ended before memlog had written everything"
        )
    assert output == wanted


def test_sync_begins_after_the_run_that_an_older_trainer_completed(killed: Path) -> None:
    sync = ("sync", KILLED)
    output = child.commands(sync, sync, directory=killed, WANDB_MODE="offline")
    assert "wandb: nothing is left to deliver, 27 points were delivered" in output
    run = read_only_run(killed / "wandb")
    rows = [{name: row[name] for name in row if name != "_runtime"} for row in run.rows]
    delivered = {"rows": rows, "alerts": run.alerts, "config": run.config}
    assert delivered == expected(f"wandb-{KILLED}")
    steps = [*own_steps(older_wandb_run()), *(10 + step for step in own_steps(run))]
    assert steps == [*range(16)]  # each once


def older_wandb_run() -> WandbFile:
    return read_run(WRITTEN / "wandb-offline" / "run-first000.wandb")


def own_steps(run: WandbFile) -> dict[int, list[float]]:
    """Return the memory of the trainer's process by step."""
    names = ("memory/host/rss_mib", "memory/host/rss_peak_mib")
    return {
        row["memlog/step"]: [row[name] for name in names] for row in run.rows if names[0] in row
    }


def test_without_its_saved_state_sync_gives_the_rows_of_the_older_trainer(killed: Path) -> None:
    (killed / "memlog_runs" / KILLED / "delivery" / "wandb.ride").unlink()
    child.memlog("sync", KILLED, directory=killed, WANDB_MODE="offline")
    runs = map(read_run, find_runs(killed / "wandb"))
    [first] = [run for run in runs if own_steps(run).keys() == {*range(10)}]
    assert own_steps(first) == own_steps(older_wandb_run())


def test_pull_gives_the_files_of_the_older_runs_folder(killed: Path) -> None:
    wanted = {FIRST: ["note"], KILLED: ["note", "flamegraph", "postmortem"]}
    pulls = [
        ("pull", run, "--kind", kind, "-o", f"out-{run}") for run in wanted for kind in wanted[run]
    ]
    child.commands(*pulls, directory=killed)
    for run in wanted:
        assert files_in(killed / f"out-{run}") == files_in(WRITTEN / "runs" / run / "artifacts")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
