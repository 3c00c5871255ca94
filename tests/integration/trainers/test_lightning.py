"""memlog in Lightning's Trainer: the run and the steps that get memory, and the data that must not change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import child, launching
from support.in_process import recorded
from support.lightning_runs import (
    PREAMBLE,
    Rows,
    count_of_steps,
    of_user,
    phases_of,
    rows_in,
    steps_of,
)
from support.wandb_file import WandbFile, find_runs, read_run

from memlog.sink import find_backends

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ready_store"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]


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


def test_validation_and_checkpoints_are_phases_and_the_sanity_check_is_none(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    begin("local")
    trainer = fit(False, validate=True, enable_checkpointing=True, callbacks=[ModelCheckpoint(save_top_k=-1)])
    print(vars(trainer).get("save_checkpoint"))
    """,
        tmp_path,
    )
    run = recorded(tmp_path)
    assert phases_of(run) == {"validation": 2, "checkpoint": 2}
    assert count_of_steps(run) == 10


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


def test_without_a_logger_memlog_opens_a_run_of_its_own(tmp_path: Path) -> None:
    child.run(PREAMBLE + "\n    begin('mlflow', name='own')\n    fit(False)\n", tmp_path)
    assert {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()} == {
        "own": list(range(10))
    }


def test_each_fit_begins_at_its_runs_first_step(
    tmp_path: Path,
) -> None:
    child.run(
        PREAMBLE
        + """
    begin("mlflow")
    try:
        fit(to_mlflow("failed"), Model(fail_at=3))
    except ValueError:
        fit(to_mlflow("again"))
    """,
        tmp_path,
    )
    found = {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()}
    assert found == {"failed": [0, 1, 2], "again": list(range(10))}


def test_a_loop_of_the_scripts_own_after_a_fit_is_counted_on(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    begin("local")
    fit(False)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    """,
        tmp_path,
    )
    assert count_of_steps(recorded(tmp_path)) == 13


def test_memlog_run_records_an_unchanged_script_into_its_loggers_run(tmp_path: Path) -> None:
    script = PREAMBLE.replace("    import wandb\n", "")
    launching.write(tmp_path, script + "\n    fit(to_mlflow('run'), validate=True)\n")
    done = launching.launch(
        tmp_path, sys.executable, "train.py", "--plain", MEMLOG_BACKEND="mlflow"
    )
    found = {name: steps_of(rows, RSS) for name, rows in rows_in(tmp_path).items()}
    assert found == {"run": list(range(10))}, done
    assert phases_of(recorded(tmp_path)) == {"validation": 2}


def test_a_fast_development_run_is_one_step(tmp_path: Path) -> None:
    child.run(
        PREAMBLE + "\n    begin('local')\n    fit(to_mlflow('x'), fast_dev_run=True)\n", tmp_path
    )
    assert count_of_steps(recorded(tmp_path)) == 1


def test_a_trainer_that_was_made_before_the_session_is_served_too(tmp_path: Path) -> None:
    printed = child.run(
        PREAMBLE
        + """
    import memlog

    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints")],
        enable_model_summary=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    print(len(trainer.callbacks))
    begin("local")
    trainer.fit(Model(), DataLoader(range(5)))
    print(len(trainer.callbacks), isinstance(trainer.callbacks[-1], ModelCheckpoint))
    """,
        tmp_path,
    )
    assert count_of_steps(recorded(tmp_path)) == 10
    assert printed.split() == ["1", "2", "True"]


def test_a_callback_by_hand_counts_once_and_a_checkpoint_holds_nothing_of_it(
    tmp_path: Path,
) -> None:
    printed = child.run(
        PREAMBLE
        + """
    import pickle

    from memlog_lightning import MemlogCallback

    begin("local")
    trainer = fit(False, callbacks=[MemlogCallback()])
    pickle.dumps(trainer.callbacks)
    trainer.save_checkpoint("model.ckpt")
    saved = torch.load("model.ckpt", weights_only=False)
    print("emlog" in repr(saved), "save_checkpoint" in vars(trainer))
    """,
        tmp_path,
    )
    assert printed.split() == ["False", "False"]
    assert count_of_steps(recorded(tmp_path)) == 10


def test_a_logger_that_fails_does_not_end_training(tmp_path: Path) -> None:
    printed = child.run(
        PREAMBLE
        + """
    class MLFlowLogger(CSVLogger):
        pass  # so it has no run_id

    session = begin("local")
    trainer = fit(MLFlowLogger("."))
    print(trainer.state.status.value, dict(session.health.faults))
    """,
        tmp_path,
    )
    assert printed.split(maxsplit=1)[0] == "finished"
    assert "joining the run of a logger: AttributeError" in printed
    assert count_of_steps(recorded(tmp_path)) == 10


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
