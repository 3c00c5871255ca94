"""Fixtures and hooks for every test."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from support.fork_server import end_servers, server_pids
from support.seeds import SeedsPlugin

# Two of torch's threads that wait for each other on two busy cores were eight times slower than one. Set
# before torch is imported, so that the programs that tests start have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without this, each of hundreds of processes would compile memlog again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("memlog.testing")  # a failed contract shows its values

# The same examples at every run; HYPOTHESIS_PROFILE=default looks for new ones.
# Without limits of time: a busy machine took ten times as long.
settings.register_profile(
    "the same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "the same"))

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that checks docs/seeds.md at the end of a run of all tests."""
    config.pluginmanager.register(SeedsPlugin(), "memlog-seeds")


LONGEST = (
    "integration/trainers/test_ray.py",
    "integration/delivery/test_outage_wandb.py",
    "integration/delivery/test_outage.py",
    "integration/docs/test_page_code.py",
    "slow/test_demo.py",
    "integration/trainers/test_lightning.py",
    "integration/launch/test_launcher.py",
    "slow/test_limits.py",
    "integration/_internal/test_secrets.py",
    "integration/wandb/test_wandb_conformance.py",
    "integration/tracer/test_tracer_inductor.py",
    "integration/journal/test_crash.py",
    "slow/test_hyco.py",
    "integration/estimates/test_estimate.py",
    "integration/wandb/test_wandb_ends.py",
    "integration/trainers/test_transformers.py",
    "integration/examples/test_example_gpt.py",
    "integration/leaks/test_growing_scripts.py",
    "integration/wandb/test_wandb_in_process.py",
    "slow/test_memory_exercise.py",
    "integration/ranks/test_torchrun.py",
    "integration/inputs/test_largest_step.py",
    "integration/oom/test_out_of_memory_causes.py",
    "integration/delivery/test_outage_postgres.py",
    "integration/estimates/test_what_is_measured.py",
    "integration/mlflow/test_mlflow_conformance.py",
    "integration/delivery/test_endless_answers.py",
    "slow/test_lazy_loading.py",
    "integration/trackio/test_trackio_server.py",
    "unit/trace/test_predict_schemes.py",
)
"""The files that take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker begins a long file last while the other workers wait."""
    here = Path(__file__).parent
    rank = {here / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Keep imported objects out of garbage collections, because some tests collect often."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape names that are not UTF-8 in a test's output, so that a worker can send it."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True, scope="module")
def _no_process_left() -> Iterator[None]:
    """Fail a file of tests if processes that it started still run a minute after its last test."""
    yield
    own = server_pids()
    children = [one for one in psutil.Process().children(recursive=True) if one.pid not in own]
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left, f"these processes were left behind: {[child.cmdline() for child in left]}"


@pytest.fixture(autouse=True, scope="session")
def _no_server_left() -> Iterator[None]:
    yield
    end_servers()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Reset torch's count of compilations: no session traces a step in a process that has compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if getattr(frames, "cached_backends", None):
        import torch._dynamo

        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_tracking_address() -> Iterator[None]:
    """Reset the address in MLflow's module after each test."""
    yield
    module = sys.modules.get("mlflow.tracking._tracking_service.utils")
    if module is not None:
        module._tracking_uri = None


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Freeze all objects, so that a search through all objects finds only those that the test makes."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_mlflows_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the environment, and keep MLflow's files out of the working directory."""
    from support.mlflow_server import environment_without_mlflow

    monkeypatch.chdir(tmp_path)
    with environment_without_mlflow():
        yield


@pytest.fixture
def ready_store(tmp_path: Path) -> str:
    """An MLflow store in the test's folder, where programs look for it. Creating its tables takes seconds."""
    from support.mlflow_server import sqlite_store

    return sqlite_store(tmp_path)
