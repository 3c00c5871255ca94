"""memlog's plugin for pytest: tests with limits on the memory of the training that they run.

::

    @pytest.mark.memory(trace_peak="< 2 GiB", growth="none", vs="baseline +1 %")
    def test_training():
        train(steps=4)

pytest loads this module at each start if memlog is installed. So it imports memlog only for marked tests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from memlog import Session
    from memlog.testing.tensor_growth import TensorGrowth

__all__: list[str] = []

MARKER = "memory"
_ENTRY = "memlog_entry"
"""Attribute of a report: the test's entry for the baseline file. pytest-xdist sends it on."""
_TRACED_STEPS = 20
"""Number of first steps of a test that are traced. Later steps are not: tracing them takes time."""
_NO_SHARE = 1e-9
"""Share of time for the tracer's own schedule. It depends on the clock, and a test's verdict must not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memlog", "memory of trainings")
    group.addoption(
        "--memlog-baseline",
        metavar="FILE",
        help="Baseline file (JSON) with which tests marked memory(vs=…) are compared.",
    )
    group.addoption(
        "--memlog-update",
        action="store_true",
        help="Write the figures of marked tests that pass into the baseline file, instead of comparing them.",
    )
    parser.addini(
        "memlog_baseline", "Baseline file of --memlog-baseline, relative to the root directory."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'memory(trace_peak="< 2 GiB", growth="none", vs="baseline +1 %"): fail the test if the training '
        "that it runs exceeds these limits of its memory (memlog).",
    )
    if config.getoption("memlog_update"):
        if _baseline(config) is None:
            raise pytest.UsageError(
                "--memlog-update needs a file: pass --memlog-baseline memory.json, or set memlog_baseline in "
                "pytest's configuration"
            )
        if not hasattr(
            config, "workerinput"
        ):  # pytest-xdist's main process collects from its workers
            config.pluginmanager.register(_Update(config), "memlog-update")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    conditions = {item.nodeid: found for item in items if (found := _conditions(item))}
    if conditions:
        gate = _MemoryGate(config, conditions)
        for item in items:
            if item.nodeid in conditions and isinstance(item, pytest.Function):
                item.fixturenames.append("tmp_path_factory")
        config.pluginmanager.register(gate, "memlog-gate")


def _conditions(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a test's markers, those nearest to the test first.

    A marker without arguments of this name may be the user's own, for another purpose.
    """
    found: dict[str, Any] = {}
    for marker in item.iter_markers(MARKER):
        for value in marker.args:
            if isinstance(value, str) and value.lstrip()[:1] in ("<", ">"):
                raise pytest.UsageError(
                    f"{item.nodeid}: @pytest.mark.{MARKER}({value!r}): name the figure, as in "
                    f"{MARKER}(trace_peak={value!r})"
                )
        found = {**marker.kwargs, **found}
    return found


def _baseline(config: pytest.Config) -> Path | None:
    option: str | None = config.getoption("memlog_baseline")
    if option:
        return config.invocation_params.dir / option
    setting: str = config.getini("memlog_baseline")
    return config.rootpath / setting if setting else None


class _MemoryGate:
    """Records a run during each marked test, and fails the test if its conditions do not hold."""

    def __init__(self, config: pytest.Config, conditions: Mapping[str, Mapping[str, Any]]) -> None:
        # Imported here, see the module.
        from memlog import ConfigurationError  # noqa: PLC0415
        from memlog.testing.limits import parse_limits  # noqa: PLC0415

        self._baseline = _baseline(config)
        self._updates = config.getoption("memlog_update")
        name = ""
        self._limits = {}
        try:
            for name, each in conditions.items():
                self._limits[name] = parse_limits(each)
        except ConfigurationError as error:
            raise pytest.UsageError(f"{name}: @pytest.mark.{MARKER}: {error}") from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        limits = self._limits.get(item.nodeid)
        if limits is None or not isinstance(item, pytest.Function):
            return (yield)
        factory: Any = item.funcargs["tmp_path_factory"]
        with _recorded(factory.mktemp("memlog"), item.nodeid, growth=limits.growth) as recorded:
            result = yield
        if recorded.session.settings.enabled:
            self._judge(item, limits, recorded)
        return result

    def _judge(self, item: pytest.Item, limits: Any, recorded: _Recorded) -> None:
        from memlog.testing.limits import measure  # noqa: PLC0415

        directory = recorded.session.directory
        if directory is None:
            pytest.fail("memlog could not begin a run: its warning says why", pytrace=False)
        baseline = None if self._updates else self._baseline
        if limits.change is not None and baseline is None and not self._updates:
            pytest.fail(
                f"{limits.change.text!r} needs a baseline file: pass --memlog-baseline memory.json, or set "
                "memlog_baseline in pytest's configuration",
                pytrace=False,
            )
        found = measure(directory, limits, item.nodeid, baseline, recorded.tensors)
        if found.peak is not None:
            item.user_properties.append(("memlog trace.peak", found.peak))
        if found.failures:
            pytest.fail("\n".join(found.failures), pytrace=False)
        setattr(item, _ENTRY, found.entry)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" and hasattr(item, _ENTRY):
            setattr(report, _ENTRY, getattr(item, _ENTRY))
        return report


class _Recorded(NamedTuple):
    session: Session
    tensors: TensorGrowth | None


@contextmanager
def _recorded(folder: Path, name: str, *, growth: bool) -> Iterator[_Recorded]:
    """Record the block as a run in ``folder``, with its first steps traced."""
    import memlog  # noqa: PLC0415 - see the module
    from memlog.settings import LONGEST_NAME  # noqa: PLC0415

    running = memlog.current_session()
    if running is not None and running.enabled:
        pytest.fail(
            "a memlog session is running already: end it with memlog.finish() before a test that is marked "
            f"with @pytest.mark.{MARKER}",
            pytrace=False,
        )
    session = memlog.init(
        "local",
        name=name[:LONGEST_NAME],
        dir=folder,
        layers=True,
        budget=_NO_SHARE,
        config={"quiet": True},
    )
    recorded = _Recorded(session, _tensors() if growth else None)
    remove = _follow_steps(recorded)
    try:
        with session:
            yield recorded
            if session.settings.enabled and not session.enabled:
                pytest.fail(
                    "the test began or ended a memlog session itself, so its memory can't be judged: remove "
                    f"memlog.init() from the test, because @pytest.mark.{MARKER} records it",
                    pytrace=False,
                )
    finally:
        remove()


def _tensors() -> TensorGrowth | None:
    try:
        from memlog.testing.tensor_growth import TensorGrowth  # noqa: PLC0415 - it imports torch
    except ImportError:
        return None
    return TensorGrowth()


def _follow_steps(recorded: _Recorded) -> Callable[[], None]:
    """Ask for the trace of each of the first steps, and count tensors. Return a function that ends this."""
    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415
    except ImportError:
        return lambda: None
    steps = 0
    recorded.session.snapshot()

    def after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps < _TRACED_STEPS:
            recorded.session.snapshot()
        if recorded.tensors is not None:
            recorded.tensors.after_step()

    return register_optimizer_step_post_hook(after_step).remove


class _Update:
    """Collects the entries of tests that passed, and writes them into the baseline file at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = _baseline(config)
        self._entries: dict[str, Any] = {}
        self._message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and hasattr(report, _ENTRY):
            self._entries[report.nodeid] = getattr(report, _ENTRY)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._file is None:
            return
        self._message = f"memlog: no marked test has passed, so {self._file} was not changed"
        if not self._entries:
            return
        from memlog import ConfigurationError  # noqa: PLC0415 - see the module
        from memlog.testing.limits import update_entries  # noqa: PLC0415

        try:
            update_entries(self._file, self._entries)
        except (ConfigurationError, OSError) as error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            self._message = f"memlog: {error}"
        else:
            count = len(self._entries)
            entries = "the entry of 1 test" if count == 1 else f"the entries of {count} tests"
            self._message = f"memlog: wrote {entries} into {self._file}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self._message)
