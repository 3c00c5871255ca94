"""Several backends at once, or no backend named. Each backend in use gets the whole run."""

from pathlib import Path

import pytest
from support import child
from support.truth import plan_of, rows_in_mlflow, rows_of
from support.wandb_file import find_runs, read_only_run, read_run

from memlog.journal import find_run

pytestmark = pytest.mark.integration

TRAINER = """
    import time
    import memlog

    def users_run():
        import wandb
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        return wandb.init(project="p", mode="offline", settings=quiet)

    def train(session, steps, run=None):
        for step in range(steps):
            session.step()
            if run is not None:
                run.log({"loss": step})
            time.sleep(0.002)
"""


def mlflows_run(directory: Path) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiments = [found.experiment_id for found in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return str(run.info.run_id)


@pytest.mark.seed(162)
@pytest.mark.usefixtures("ready_store")
def test_own_runs_in_both(tmp_path: Path) -> None:
    child.run(
        TRAINER
        + """
    with memlog.init(["wandb", "mlflow"], finish_timeout=120) as session:
        train(session, 50)
    """,
        tmp_path,
        WANDB_MODE="offline",
    )
    run = find_run(tmp_path / "memlog_runs", "latest")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert rows_in_mlflow(uri, mlflows_run(tmp_path)) == rows_of(plan_of(run))
    steps = [row["memlog/step"] for row in read_only_run(tmp_path).rows if "memlog/step" in row]
    assert sorted(set(steps)) == list(range(50))


@pytest.mark.usefixtures("ready_store")
def test_one_is_written_in_process_and_the_other_has_its_own_run(tmp_path: Path) -> None:
    child.run(
        TRAINER
        + """
    with memlog.init(["wandb", "mlflow"], finish_timeout=120) as session:
        train(session, 50, users_run())
    """,
        tmp_path,
    )
    run = find_run(tmp_path / "memlog_runs", "latest")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert rows_in_mlflow(uri, mlflows_run(tmp_path)) == rows_of(plan_of(run))
    held = read_only_run(tmp_path)
    assert [row["loss"] for row in held.users_rows()] == list(range(50))
    assert held.memlogs_rows()[-1]["memlog/step"] == 49
    assert held.job_type != "memlog"


def test_with_nothing_named_it_joins_what_appears(tmp_path: Path) -> None:
    child.run(
        TRAINER
        + """
    session = memlog.init(finish_timeout=120)
    train(session, 50, users_run())
    """,
        tmp_path,
    )
    assert not (tmp_path / "mlflow.db").exists()
    (path,) = find_runs(tmp_path)
    held = read_run(path)
    assert [row["loss"] for row in held.users_rows()] == list(range(50))
    assert held.memlogs_rows()[-1]["memlog/step"] == 49


def test_resumed_training_goes_on_at_its_step_and_run(tmp_path: Path) -> None:
    script = (
        TRAINER
        + """
    import sys
    from memlog._internal import current_session
    first = int(sys.argv[1])
    memlog.init("wandb", initial_step=first, finish_timeout=120)
    import wandb
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    run = wandb.init(id="same", project="p", mode="offline", settings=quiet)
    session = current_session.publisher()
    for step in range(first, first + 40):
        session.step()
        run.log({"loss": step}, step=step)
        time.sleep(0.002)
    """
    )
    for first in (0, 40):
        child.run(script, tmp_path, str(first))
    held = [read_run(path) for path in find_runs(tmp_path)]
    assert [run.run_id for run in held] == ["same", "same"]
    for first, run in zip((0, 40), held, strict=True):
        assert [row["loss"] for row in run.users_rows()] == list(range(first, first + 40))
        mine = [row["memlog/step"] for row in run.memlogs_rows() if "memlog/step" in row]
        assert first <= mine[0] <= mine[-1] == first + 39
