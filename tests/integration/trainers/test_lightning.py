"""memlog in Lightning's Trainer: the run and the steps that get memory, and the data that must not change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import child, launching
from support.in_process import recorded
from support.lightning_runs import PREAMBLE, Rows, of_user, phases_of, rows_in, steps_of
from support.wandb_file import WandbFile, find_runs, read_run

from memlog.sink import find_backends

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ready_store")]


RSS = "memory/host/rss_mib"


LOOPS = {
    "automatic": "fit(to_mlflow('automatic'), validate=True)",
    "accumulated": "fit(to_mlflow('accumulated'), batches=10, accumulate_grad_batches=4)",
    "two optimizers": "fit(to_mlflow('two optimizers'), Gan())",
}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Rows]]:
    """The runs of `LOOPS` by name, without memlog (``--plain``) and with it (``--memlog``)."""
    from support.mlflow_server import sqlite_store

    body = "".join(
        f"\n    session = begin('mlflow')\n    {loop}\n    session and session.finish()\n"
        for loop in LOOPS.values()
    )
    found = {}
    for how in ("--plain", "--memlog"):
        folder = tmp_path_factory.mktemp("loops")
        sqlite_store(folder)
        child.run(PREAMBLE + body, folder, how)
        found[how] = rows_in(folder)
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_an_mlflow_loggers_run_has_memory_at_its_steps(
    loops: dict[str, dict[str, Rows]], loop: str
) -> None:
    assert loops["--memlog"].keys() == LOOPS.keys()
    rows = loops["--memlog"][loop]
    assert steps_of(rows, "loss")
    assert steps_of(rows, RSS) == steps_of(rows, "loss")


@pytest.mark.parametrize("loop", LOOPS)
def test_the_rows_of_the_user_are_the_same_as_without_memlog(
    loops: dict[str, dict[str, Rows]], loop: str
) -> None:
    assert of_user(loops["--memlog"][loop]) == loops["--plain"][loop]


SESSIONS = """
    import pickle

    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints")],
        enable_model_summary=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    begin("local", name="trainer made before")
    assert len(trainer.callbacks) == 1
    trainer.fit(Model(), DataLoader(range(5)))
    assert len(trainer.callbacks) == 2
    assert isinstance(trainer.callbacks[-1], ModelCheckpoint)

    begin("local", name="validation and checkpoints")
    fit(False, validate=True, enable_checkpointing=True, callbacks=[ModelCheckpoint(save_top_k=-1)])

    begin("local", name="callback by hand")
    trainer = fit(False, callbacks=[memlog_lightning.MemlogCallback()])
    pickle.dumps(trainer.callbacks)
    trainer.save_checkpoint("model.ckpt")
    assert "emlog" not in repr(torch.load("model.ckpt", weights_only=False))
    assert "save_checkpoint" not in vars(trainer)

    begin("local", name="fast development run")
    fit(to_mlflow("x"), fast_dev_run=True)

    class MLFlowLogger(CSVLogger):
        pass  # so it has no run_id

    session = begin("local", name="failing logger")
    assert fit(MLFlowLogger(".")).state.status.value == "finished"
    assert "joining the run of a logger: AttributeError" in session.health.faults

    begin("local", name="loop after fit")
    fit(False)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, launching.Recorded]:
    """The runs of `SESSIONS` by name. Each session ends the one before."""
    folder = tmp_path_factory.mktemp("sessions")
    child.run(PREAMBLE + "\n    import memlog\n    import memlog_lightning\n" + SESSIONS, folder)
    return {run.name: run for run in launching.recorded(folder / "memlog_runs")}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("trainer made before", 10),
        ("validation and checkpoints", 10),
        ("callback by hand", 10),
        ("fast development run", 1),
        ("failing logger", 10),
        ("loop after fit", 13),
    ],
)
def test_each_step_counts_once(
    sessions: dict[str | None, launching.Recorded], name: str, steps: int
) -> None:
    assert sessions[name].steps == list(range(steps))


def test_validation_and_checkpoints_are_phases_and_the_sanity_check_is_none(
    sessions: dict[str | None, launching.Recorded],
) -> None:
    run = sessions["validation and checkpoints"].directory
    assert phases_of(run) == {"validation": 2, "checkpoint": 2}


def test_each_fit_begins_at_the_first_step_of_its_loggers_run_or_of_memlogs(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    begin("mlflow", name="own")
    fit(False)
    begin("mlflow")
    try:
        fit(to_mlflow("failed"), Model(fail_at=3))
    except ValueError:
        fit(to_mlflow("again"))
    """,
        tmp_path,
    )
    found = {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()}
    every = list(range(10))
    assert found == {"own": every, "failed": [0, 1, 2], "again": every}


def test_the_rows_of_a_wandb_logger_carry_the_memory_of_their_step(tmp_path: Path) -> None:
    read: dict[str, WandbFile] = {}
    for how in ("--plain", "--memlog"):
        (folder := tmp_path / how).mkdir()
        child.run(
            PREAMBLE + "\n    begin('wandb')\n    fit(to_wandb())\n    wandb.finish()\n",
            folder,
            how,
        )
        (path,) = find_runs(folder)
        read[how] = read_run(path)
    without, made = read["--plain"], read["--memlog"]
    assert made.users_rows() == without.users_rows()
    carried = {row["trainer/global_step"]: row["memlog/step"] for row in made.rows if RSS in row}
    assert carried == {step: step for step in range(10)}


def test_each_of_several_loggers_gets_the_memory(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + "\n    begin()\n    fit([CSVLogger('.'), to_mlflow('run'), to_wandb()])\n    wandb.finish()\n",
        tmp_path,
    )
    (path,) = find_runs(tmp_path)
    assert steps_of(rows_in(tmp_path)["run"], RSS) == list(range(10))
    assert sorted(row["memlog/step"] for row in read_run(path).rows if RSS in row) == list(
        range(10)
    )


@pytest.mark.skipif("tensorboard" not in find_backends(), reason="there is no such backend yet")
def test_the_folder_of_a_tensorboard_logger_gets_the_memory(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    child.run(
        PREAMBLE
        + "\n    begin('tensorboard')\n    fit(TensorBoardLogger('.', 'runs', 'one'))\n    memlog.finish()\n",
        tmp_path,
    )
    read = EventAccumulator(str(tmp_path / "runs" / "one"))
    read.Reload()
    assert [row.step for row in read.Scalars("loss")] == list(range(10))
    assert [row.step for row in read.Scalars(RSS)] == list(range(10))


def test_memlog_run_records_an_unchanged_script_into_its_loggers_run(tmp_path: Path) -> None:
    script = PREAMBLE.replace("    import wandb\n", "")
    launching.write(tmp_path, script + "\n    fit(to_mlflow('run'), validate=True)\n")
    done = launching.launch(
        tmp_path, sys.executable, "train.py", "--plain", MEMLOG_BACKEND="mlflow"
    )
    found = {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()}
    assert found == {"run": list(range(10))}, done
    assert phases_of(recorded(tmp_path)) == {"validation": 2}


def test_without_a_session_a_trainer_gets_nothing_and_memlog_is_not_loaded(tmp_path: Path) -> None:
    printed = child.run(
        """
    import lightning.pytorch as pl
    import json
    import sys

    import memlog_lightning

    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    names = [type(one).__name__ for one in trainer.callbacks]
    print(json.dumps([memlog_lightning.callbacks(), names, "memlog" in sys.modules]))
    """,
        tmp_path,
    )
    callbacks, names, loaded = json.loads(printed.splitlines()[-1])
    assert not callbacks
    assert "MemlogCallback" not in names
    assert not loaded


def test_the_package_pytorch_lightning_is_served_too(tmp_path: Path) -> None:
    script = PREAMBLE.replace("lightning.pytorch as pl", "pytorch_lightning as pl").replace(
        "from lightning.pytorch", "from pytorch_lightning"
    )
    child.run(script + "\n    begin('mlflow')\n    fit(to_mlflow('run'))\n", tmp_path)
    found = {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()}
    assert found == {"run": list(range(10))}
