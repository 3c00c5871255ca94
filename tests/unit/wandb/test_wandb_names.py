"""Names, addresses and the environment: parts of the W&B integration that don't import wandb."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlog.sink import Backend, Connection, InProcessBackend
from memlog_wandb import backend, environment
from memlog_wandb.addresses import address_of, link_to, offline_folder, run_path, server_of
from memlog_wandb.names import artifact_name, artifact_type, cut_title, safe_key


def test_it_is_a_backend_that_writes_in_process() -> None:
    assert isinstance(backend, Backend)
    assert isinstance(backend, InProcessBackend)


@pytest.mark.parametrize(
    "key", ["memory/host/rss_mib", "memory/layers/blocks.0.mlp.peak_mib", "a-b_c d"]
)
def test_a_fine_key_stays(key: str) -> None:
    assert safe_key(key) == key


@pytest.mark.parametrize("key", ["memory/*", "_step", "", "é", "m" * 300, "a\nb", "\ud800"])
def test_any_other_key_becomes_one_of_its_own(key: str) -> None:
    made = safe_key(key)
    assert made == safe_key(key)
    assert "*" not in made
    assert made[0].isalpha()
    assert len(made) <= 250
    assert made != safe_key(f"{key}!")


ANY_NAME = st.text(max_size=300) | st.text(alphabet="a/._-* é", max_size=300)


@given(ANY_NAME)
def test_whatever_a_metric_is_called_wandb_can_take_it(name: str) -> None:
    made = safe_key(name)
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_\-./ ]{0,249}", made)
    assert safe_key(made) == made


@given(st.lists(ANY_NAME, unique=True, max_size=20))
def test_no_two_metrics_become_one(names: list[str]) -> None:
    assert len({safe_key(name) for name in names}) == len(names)


@given(ANY_NAME, ANY_NAME)
def test_whatever_a_file_is_called_wandb_can_take_it(name: str, kind: str) -> None:
    for made in (artifact_name("k7m2xq9a", name), artifact_name("k7m2xq9a", kind)):
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", made)
    assert re.fullmatch(r"[A-Za-z0-9._-]{0,128}", artifact_type(kind))


def test_artifacts_are_named_by_their_run_and_keep_to_wandbs_types() -> None:
    assert artifact_name("r1", "a.json") == "memlog-r1-a.json"
    assert len(artifact_name("r1", "x" * 128)) == 128
    assert artifact_type("flamegraph") == "flamegraph"
    assert [artifact_type(kind) for kind in ("job", "wandb-history")] == [
        "memlog-job",
        "memlog-wandb-history",
    ]
    assert cut_title("t" * 64) == "t" * 64
    assert len(cut_title("t" * 65)) == 64


def test_a_runs_address_is_taken_apart() -> None:
    address = "https://wandb.example/base/me/project/runs/abc"
    assert server_of(address) == "https://wandb.example/base"
    assert server_of("https://api.wandb.ai") == "https://api.wandb.ai"
    assert server_of(None) is None
    assert str(run_path(address)) == "me/project/abc"
    assert str(run_path("abc")) == "abc"
    assert run_path("project/abc")[:] == (None, "project", "abc")


def test_an_offline_runs_address_tells_its_folder_and_project() -> None:
    settings = SimpleNamespace(
        _offline=True, run_id="abc", entity=None, project="p", sync_dir="/w/offline-run-1-abc"
    )
    address = address_of(settings)
    assert address is not None
    assert (server_of(address), offline_folder(address)) == (None, "/w/offline-run-1-abc")
    assert run_path(address)[:] == (None, "p", "abc")
    settings.entity = "me"
    assert run_path(str(address_of(settings)))[:] == ("me", "p", "abc")
    settings.project = None
    assert run_path(str(address_of(settings)))[:] == (None, None, "abc")
    assert offline_folder("https://wandb.example/me/p/runs/abc") is None
    assert server_of(address_of(SimpleNamespace(_noop=True))) is None


def test_a_link_leads_to_the_run_or_uploads_it() -> None:
    import wandb

    online = wandb.Settings(
        base_url="https://wandb.example", entity="me", project="p", run_id="abc", mode="online"
    )
    assert link_to(online) == "https://wandb.example/me/p/runs/abc"
    assert link_to(wandb.Settings(run_id="abc", mode="online")) is None  # no entity yet
    offline = SimpleNamespace(_offline=True, sync_dir="/w/offline run-1-abc")
    assert link_to(offline) == "wandb sync '/w/offline run-1-abc'"
    assert link_to(SimpleNamespace(_noop=True)) is None


def test_the_users_own_run_and_connection_stay_out_of_the_helper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SWEEP_ID"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    found = environment.gathered()
    assert found["WANDB_API_KEY"] == "secret"
    assert not {"WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SWEEP_ID"} & set(found)
    monkeypatch.setattr("os.environ", {"WANDB_SERVICE": "theirs"})
    environment.apply(Connection("https://h/e/p/runs/i", found))
    import os

    assert "WANDB_SERVICE" not in os.environ
    assert os.environ["WANDB_BASE_URL"] == "https://h"
