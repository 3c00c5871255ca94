"""The environment's credentials go only to the environment's own tracker."""

from pathlib import Path

import pytest

from memlog._internal.connections import (
    CredentialScope,
    is_other_file,
    is_same_place,
    secret_names,
    withheld,
)
from memlog_mlflow import backend as mlflow_backend
from memlog_wandb import backend as wandb_backend

SCOPE = CredentialScope(
    "https://me:pw@tracking.corp/base", ("MLFLOW_TRACKING_TOKEN",), frozenset({"databricks"})
)


@pytest.fixture(autouse=True)
def _no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("NETRC", "WANDB_BASE_URL", "WANDB_API_KEY", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "address",
    [
        None,
        "",
        "https://tracking.corp",
        "https://TRACKING.corp:443/other/",
        "sqlite:////home/me/m.db",
        "/home/me/mlruns",
        "file:///home/me/mlruns",
        "databricks",
        "databricks://profile",
        "offline:/home/me/wandb/offline-run-1#runs/1",
        "disabled:",
    ],
)
def test_the_environments_and_local_addresses_get_credentials(address: str | None) -> None:
    assert withheld(address, SCOPE) == ()


@pytest.mark.parametrize(
    "address",
    [
        "http://tracking.corp",
        "https://tracking.corp:8443",
        "https://tracking.corp.evil.com",
        "https://tracking.corp@evil.com",
        "https://evil.com\\@tracking.corp",
        "https://evil.com#@tracking.corp",
        "https:evil.com",
        "HTTPS://evil.com",
        "postgresql://tracking.corp/db?host=evil.com",
        "mssql+pyodbc:///?odbc_connect=SERVER%3Devil.com",
        "wasbs://evil.com/x",
    ],
)
def test_any_other_is_not_sent_what_the_environment_holds(address: str) -> None:
    assert withheld(address, SCOPE) == ("MLFLOW_TRACKING_TOKEN",)
    assert withheld(address, CredentialScope(SCOPE.address)) == ()


def test_an_address_that_the_user_names_is_trusted() -> None:
    assert withheld("http://other:5000/x", SCOPE, ["http://other:5000"]) == ()
    assert withheld("http://other:5001", SCOPE, ["http://other:5000"])


def test_an_address_is_compared_without_its_password() -> None:
    assert is_same_place("postgresql://host/db", "postgresql://me:pw@host/db")
    assert not is_same_place("postgresql://host/db", "postgresql://me:pw@host/other")


def test_a_netrc_file_gives_a_host_its_password_and_any_host_a_default(tmp_path: Path) -> None:
    nothing = CredentialScope("https://tracking.corp")
    file = tmp_path / ".netrc"
    file.write_text("machine lab login me password pw\n")
    assert withheld("http://lab:5000", nothing) == ("~/.netrc",)
    assert withheld("http://other:5000", nothing) == ()
    file.write_text("default login me password pw\n")
    assert withheld("http://other:5000", nothing) == ("~/.netrc",)


def test_variables_that_hold_credentials_are_known_by_their_names() -> None:
    environment = {"A_TOKEN": "x", "MY_PASSWORD": "x", "B_KEY": "x", "A_URI": "x", "C_TOKEN": ""}
    assert secret_names(environment) == ("A_TOKEN", "B_KEY", "MY_PASSWORD")


def test_mlflows_address_and_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://lab:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pw")
    # These credentials work only for Amazon, so they are no reason to refuse a tracker.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    scope = mlflow_backend.home()
    assert scope.address == "http://lab:5000"
    assert scope.credentials == ("MLFLOW_TRACKING_PASSWORD", "~/.mlflow/credentials")


def test_wandbs_address_comes_from_the_environment_or_settings_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wandb_backend.home() == CredentialScope("https://api.wandb.ai")
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.corp\napi_key = x\n")
    assert wandb_backend.home() == CredentialScope("https://wandb.corp", (str(settings),))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.lab")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_backend.home() == CredentialScope(
        "https://wandb.lab", ("WANDB_API_KEY", str(settings))
    )


@pytest.mark.parametrize(
    "address",
    [
        "sqlite:////home/me/photos.db",
        "sqlite+pysqlite:////home/me/photos.db?x=1",
        "file:///home/me/mlruns",
        "file:/home/me/mlruns",
        "file://localhost/home/me/mlruns",
        "/home/me/mlruns",
        "sqlite:///other.db",
        "sqlite:///mlruns/../other.db",
        "~/other",
        "runs",
    ],
)
def test_a_file_that_only_the_run_names_needs_trust(address: str) -> None:
    scope = CredentialScope("http://own", defaults=("mlruns", "sqlite:///mlflow.db"))
    assert is_other_file(address, scope)
    assert not is_other_file(address, scope, [address])
    assert not is_other_file(address, CredentialScope(address))


def test_the_clients_own_default_and_what_is_no_file_need_none(tmp_path: Path) -> None:
    own = frozenset({"databricks"})
    scope = CredentialScope(None, own_schemes=own, defaults=("mlruns", "sqlite:///mlflow.db"))
    for address in (
        *(None, "", "http://own", "databricks", "disabled:", f"sqlite:///{tmp_path}/mlflow.db"),
        *(f"file://{tmp_path}/mlruns", f"{tmp_path}/mlruns"),
    ):
        assert not is_other_file(address, scope)
