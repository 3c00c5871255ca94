"""Ray Train's callback outside a cluster: what it takes from the driver, and memlog's errors in it."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import memlog
from memlog.errors import ConfigurationError

pytest.importorskip("ray.train")
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _in_a_folder_of_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MEMLOG_DIR", "MEMLOG_BACKEND", "MLFLOW_TRACKING_URI", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def copied(callback: Any) -> Any:
    """A copy of the callback, as a worker gets it."""
    return pickle.loads(pickle.dumps(callback))  # noqa: S301 - written in this line


def test_a_wrong_setting_is_refused_where_it_is_written() -> None:
    from memlog_ray import MemlogCallback

    with pytest.raises(ConfigurationError, match="did you mean 'every'"):
        MemlogCallback(evry=2)


def test_a_workers_copy_has_the_drivers_folder_and_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlog_ray import MemlogCallback

    callback = MemlogCallback(backend="mlflow")
    for address in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        in_controller = copied(callback)
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        monkeypatch.chdir("/")
        worker = copied(in_controller)
        assert worker._settings["directory"] == str(tmp_path / "memlog_runs")
        assert worker._driver.directory == str(tmp_path)
        assert worker._driver.addresses == {"MLFLOW_TRACKING_URI": address}
        monkeypatch.chdir(tmp_path)


def test_no_address_is_taken_for_a_tracker_that_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If no tracker is named, memlog joins the user's runs, and opens none."""
    from memlog_ray import MemlogCallback

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert copied(MemlogCallback())._driver.addresses == {}


def test_the_training_does_not_see_the_variables_of_memlogs_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from memlog_ray.processes import variables

    monkeypatch.setenv("RANK", "7")
    with variables(RANK="1", TORCHELASTIC_RUN_ID="some"):
        assert (os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"]) == ("1", "some")
    assert os.environ["RANK"] == "7"
    assert "TORCHELASTIC_RUN_ID" not in os.environ


def test_memlogs_errors_are_printed_and_never_raised(capsys: pytest.CaptureFixture[str]) -> None:
    from memlog_ray import MemlogCallback

    worker = copied(MemlogCallback(backend="mlfow"))
    worker.after_init_train_context()  # there is no context: this is no worker
    with memlog.init("local", dir="runs", config={"quiet": True}) as session:
        worker.before_worker_shutdown()
        assert session.enabled
    with worker.on_checkpoint_transfer():
        pass
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memlog: ")]
    assert [line.partition(" (")[0] for line in lines] == [
        "memlog: the workers do not get the driver's trackers and runs",
        "memlog: this worker goes on without being recorded",
        "memlog: the end of this worker's run is not recorded",
    ]
