"""Fixtures and hooks for every test."""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from support import devices
from support.fork_server import end_servers, server_pids
from support.seeds import SeedsPlugin

# Two of torch's threads that wait for each other on two busy cores were eight times slower than one. Set
# before torch is imported, so that the programs that tests start have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A thread of mlflow's telemetry changes the environment, also while another thread reads it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

# Without this, each of hundreds of processes would compile memlog again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers that run at the same time have simulated devices of their own (tests/cuda_runtime). Set before torch
# is imported.
os.environ["FAKE_CUDA_STATE"] = devices.OF_THIS_PROCESS

# A failed contract, or a device's wrong figure, shows its values.
pytest.register_assert_rewrite("memlog.testing", "support.device_figures")

# The same examples at every run; HYPOTHESIS_PROFILE=default looks for new ones.
# Without limits of time: a busy machine took ten times as long.
settings.register_profile(
    "the same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "the same"))

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that checks docs/project/seeds.md at the end of a run of all tests."""
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
    "integration/testing/test_pytest_plugin.py",
    "integration/examples/test_example_gpt.py",
    "integration/leaks/test_growing_scripts.py",
    "integration/wandb/test_wandb_in_process.py",
    "slow/test_memory_exercise.py",
    "integration/estimates/test_saving_cuda.py",
    "integration/estimates/test_saving.py",
    "integration/trainers/test_trainers_cuda.py",
    "integration/ranks/test_ranks_cuda.py",
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


_crashed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "???":  # what xdist reports about the test of a worker that has crashed
        _crashed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell a crash from a failed test by the exit status: tests after a crash may not have run at all."""
    if _crashed:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose device is missing, unless the run exists for these tests: then it fails."""
    wanted = [kind for kind in ("cuda", "gpu") if item.get_closest_marker(kind)]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        remedy = "no CUDA device: `make cuda-tests` simulates one"
        (pytest.fail if "MEMLOG_TESTS_NEED_CUDA" in os.environ else pytest.skip)(remedy)
    if "gpu" in wanted and devices.simulated():
        pytest.skip("simulated devices run no kernels")


@pytest.fixture(autouse=True, scope="module")
def _no_process_left() -> Iterator[None]:
    """Fail a file of tests if processes that it started still run a minute after its last test."""
    yield
    own = server_pids()
    children = [
        one
        for one in psutil.Process().children(recursive=True)
        if one.pid not in own and not _symbolizes(one)
    ]
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left, f"these processes were left behind: {[child.cmdline() for child in left]}"


def _symbolizes(process: psutil.Process) -> bool:
    """Return whether this is an ``addr2line``: torch keeps one per library from the first C++ stack on."""
    try:
        return process.name().endswith("addr2line")
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True, scope="session")
def _nothing_left() -> Iterator[None]:
    yield
    end_servers()
    Path(devices.OF_THIS_PROCESS).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _devices_of_its_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test's programs simulated devices on which earlier tests have left nothing in this process."""
    if not request.node.get_closest_marker("cuda"):
        yield
        return
    import torch

    torch.cuda.mem_get_info()  # from its first use on, this process keeps its own devices
    of_programs = Path(f"{devices.OF_THIS_PROCESS}-programs")
    os.environ["FAKE_CUDA_STATE"] = str(of_programs)
    yield
    os.environ["FAKE_CUDA_STATE"] = devices.OF_THIS_PROCESS
    of_programs.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Reset torch's count of compilations: no session traces a step in a process that has compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})
    # None: a function that was only excluded from compilation. The optimizers have some.
    if all(backend is None for backend in backends.values()):
        return
    import torch._dynamo

    with warnings.catch_warnings():
        # If there is a CUDA device, `reset` imports a module of torch that uses what torch has deprecated.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is", DeprecationWarning)
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
