"""Hydra's jobs, each a run of its own, with the real Hydra and the real MLflow."""

import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.launching import Recorded, recorded
from support.truth import plan_of, rows_in_mlflow, rows_of, wait_until_delivered

import memlog

pytest.importorskip("hydra")
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from memlog_hydra import MemlogCallback

pytestmark = pytest.mark.integration

CALLBACK = "{_target_: memlog_hydra.MemlogCallback, backend: mlflow}"
TRAIN = """
    import mlflow
    import torch

    import contextlib

    import hydra

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def main(config):
        own = config.get("own")
        with mlflow.start_run(run_name=own) if own else contextlib.nullcontext():
            train(config)

    def train(config):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(config.steps):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if config.get("own"):
                mlflow.log_metric("loss", step, step=step)
        if config.steps == 3:
            raise ValueError("three is too many")

    main()
"""


def run(folder: Path, *arguments: str, more: str = "") -> Any:
    """Run the script with a configuration that has the callback; return its exit code and its output."""
    (folder / "conf").mkdir()
    config = f"steps: 2\nhydra:\n  callbacks:\n    memlog: {CALLBACK}\n{textwrap.dedent(more)}"
    (folder / "conf" / "config.yaml").write_text(config)
    process = child.start(
        TRAIN, folder, *arguments, MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db"
    )
    output, errors = process.communicate(timeout=240)
    return process.returncode, output + errors


def runs_in(folder: Path) -> dict[str | None, Recorded]:
    """Return the runs by name, after all their points are delivered."""
    found = {run.name: run for run in recorded(folder)}
    for one in found.values():
        wait_until_delivered(folder, run_id=one.directory.id)
    return found


def shown_in(store: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(store)
    shown = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {run.info.run_name: run for run in shown}


def test_each_job_of_a_multirun_has_a_run_here_and_in_the_tracker(
    tmp_path: Path, ready_store: str
) -> None:
    code, printed = run(tmp_path, "-m", "steps=3,2")
    assert code == 1
    assert "ValueError: three is too many" in printed
    runs = runs_in(tmp_path / "memlog_runs")
    assert list(runs) == ["train steps=3", "train steps=2"]
    assert [each.steps for each in runs.values()] == [[0, 1, 2], [0, 1]]
    assert [each.status for each in runs.values()] == ["failed", "finished"]
    shown = shown_in(ready_store)
    assert {name: each.info.status for name, each in shown.items()} == {
        "train steps=3": "FAILED",
        "train steps=2": "FINISHED",
    }
    for name, each in runs.items():
        rows = rows_in_mlflow(ready_store, shown[str(name)].info.run_id)
        assert rows == rows_of(plan_of(each.directory))


def test_jobs_runs_of_the_user_are_joined_and_their_rows_are_as_before(
    tmp_path: Path, ready_store: str
) -> None:
    """Each job also has its own working directory and a section ``memlog`` in its configuration."""
    from mlflow import MlflowClient

    section = """
        own: mine ${steps}
        memlog: {backend: local, name: "${hydra:job.num} ${own}", every: 1}
    """
    overrides = ("steps=2,4", "memlog.every=2", "hydra.job.chdir=true")
    code, printed = run(tmp_path, "-m", *overrides, more=section)
    assert code == 0, printed
    runs = runs_in(tmp_path / "memlog_runs")
    assert {name: each.steps for name, each in runs.items()} == {
        "0 mine 2": [0],
        "1 mine 4": [0, 2],
    }
    shown = shown_in(ready_store)
    assert set(shown) == {"mine 2", "mine 4"}
    for name, each in runs.items():
        run_id = shown[str(name)[2:]].info.run_id
        assert rows_in_mlflow(ready_store, run_id) == rows_of(plan_of(each.directory))
        losses = MlflowClient(ready_store).get_metric_history(run_id, "loss")
        assert [(row.step, row.value) for row in losses] == [
            (step, step) for step in range(int(str(name)[-1]))
        ]


CONFIG = {"hydra": {"job": {"name": "train"}, "mode": "RUN"}}


def test_a_job_goes_on_if_memlog_can_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    callback = MemlogCallback(backend="mlfow")
    callback.on_job_start(OmegaConf.create(CONFIG), task_function=print)
    callback.on_job_end(OmegaConf.create(CONFIG), JobReturn(status=JobStatus.COMPLETED))
    assert capsys.readouterr().err.startswith(
        "memlog: this job goes on without being recorded (no backend is called 'mlfow'"
    )


def test_a_wrong_setting_is_refused_before_the_job() -> None:
    with pytest.raises(memlog.ConfigurationError, match="did you mean 'every'"):
        MemlogCallback(evry=2)


def test_a_launcher_that_copies_the_callback_to_another_process_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied = pickle.dumps(MemlogCallback(backend="local", quiet=True))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    callback = pickle.loads(copied)  # noqa: S301 - written above
    callback.on_job_start(OmegaConf.create(CONFIG), task_function=print)
    callback.on_job_end(OmegaConf.create(CONFIG), JobReturn(status=JobStatus.COMPLETED))
    assert memlog.current_session() is None
    [only] = recorded(tmp_path / "memlog_runs")
    assert (only.name, only.status) == ("train", "finished")
