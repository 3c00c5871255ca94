"""Settings: arguments over configuration over environment; a wrong value raises an error at once."""

from pathlib import Path
from typing import Any

import pytest

from memlog.delivery.helper.protocol import Begin, encode
from memlog.errors import ConfigurationError
from memlog.settings import Settings, resolve, runs_directory


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMLOG_DIR", "MEMLOG_BACKEND", "MEMLOG_ENABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.seed(53)
def test_the_monitors_keys_are_read_from_every_section() -> None:
    for on, batches in ((False, 3), (True, 7)):
        keys = {"enable_memory_monitoring": on, "memory_monitor_batches": batches}
        for config in (keys, {"trainer_params": {**keys, "batch_size": 8}}, {"memlog": keys}):
            settings = resolve({}, config)
            assert (settings.enabled, settings.verbose_batches) == (on, batches)


def test_memlogs_own_keys_are_understood() -> None:
    config = {"memlog": {"backend": "mlflow, wandb", "every": 5, "project": "p", "dir": "/runs/x"}}
    settings = resolve({}, config)
    assert settings.backends == ("mlflow", "wandb")
    assert (settings.every, settings.project, settings.directory) == (5, "p", "/runs/x")


def test_finish_waits_ten_seconds_by_default() -> None:
    assert resolve({}, {}).finish_timeout == 10
    assert resolve({"finish_timeout": 0.5}, {}).finish_timeout == 0.5


def test_arguments_override_configuration() -> None:
    assert resolve({"every": 2}, {"every": 7}).every == 2


def test_unrelated_keys_are_ignored() -> None:
    assert resolve({}, {"learning_rate": 0.1, "model": {"depth": 4}}).enabled


def test_a_misspelt_key_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'enable_memory_monitoring'"):
        resolve({}, {"enable_memory_monitorng": True})


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": "often"},
        {"initial_step": -1},
        {"name": "n" * 1001},
        {"name": "not UTF-8: \udcff"},
        {"project": "not UTF-8: \udcff"},
        {"alerts": ("host.rss > 1 \udcff",)},
        {"alerts": ("host.rss > 1 GiB",) * 2000},
        {"directory": "runs\udcff"},
        {"sample_interval": 0.0},
        {"finish_timeout": float("nan")},
        {"finish_timeout": -1},
        {"backends": (3,)},
        {"enabled": "perhaps"},
        {"unknown": 1},
    ],
)
def test_invalid_settings_are_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve(arguments)
    assert len(str(raised.value)) < 400


def test_the_longest_that_is_accepted_goes_through_the_helpers_pipe() -> None:
    """The pipe holds 64 KiB before the helper has started to read."""
    longest = resolve(
        {
            "name": "\N{KEY}" * 1000,
            "project": "\N{KEY}" * 1000,
            "alerts": ('"' * 20_000,),
            "directory": "/" + "\N{KEY}" * 1000,
        }
    )
    assert len(encode(Begin("/" + "\N{KEY}" * 1000, 0, 1, longest))) < 65536


@pytest.mark.parametrize("variable", [None, "relative"])
def test_a_deleted_working_directory_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.delenv("MEMLOG_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("MEMLOG_DIR", variable)
    with pytest.raises(ConfigurationError, match="set MEMLOG_DIR to an absolute path"):
        resolve({})
    assert resolve({"directory": str(tmp_path)}).directory == str(tmp_path)


def test_the_environment_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_BACKEND", "mlflow")
    monkeypatch.setenv("MEMLOG_DIR", "/somewhere")
    assert resolve({}).backends == ("mlflow",)
    assert resolve({"backends": ("local",)}).backends == ("local",)
    assert resolve({}).directory == "/somewhere"
    assert runs_directory("/given") == Path("/given")


def test_a_backend_that_is_named_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two uploaders of one name would keep each other from delivering."""
    names = ["mlflow", "local", "mlflow"]
    assert resolve({"backends": names}).backends == ("mlflow", "local")
    assert resolve({}, {"memlog": {"backend": names}}).backends == ("mlflow", "local")
    monkeypatch.setenv("MEMLOG_BACKEND", "mlflow,local, mlflow")
    assert resolve({}).backends == ("mlflow", "local")


def test_the_environment_can_switch_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLOG_ENABLED", "0")
    assert not resolve({"enabled": True}).enabled


def test_the_runs_folder_is_absolute() -> None:
    assert Path(resolve({}).directory) == Path.cwd() / "memlog_runs"


def test_only_changed_settings_are_recorded() -> None:
    assert Settings().described() == {"every": "1"}
    assert Settings(every=3, initial_step=7).described() == {"every": "3", "initial_step": "7"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"evry": 5}, "did you mean 'every'"),
        ({"sample_intervall": 1}, "did you mean 'sample_interval'"),
        ({"zzz": 1}, "known keys are alert_webhook, alerts, backend, backends"),
        (5, "pass a mapping"),
    ],
)
def test_memlogs_own_section_knows_its_keys(section: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve({}, {"memlog": section})


@pytest.mark.parametrize(
    "section", [{"alerts": [{"error": "host.rss > 80%"}]}, {"alerts": {"error": "host.rss > 80%"}}]
)
def test_a_rule_read_as_a_mapping_has_a_remedy(section: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve({}, {"memlog": section})
    assert 'put quotes around it, "error: host.rss > 80%"' in str(raised.value)
    assert "or write `host.rss > 80% as error`" in str(raised.value)
