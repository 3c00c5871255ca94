"""A session, from ``init`` to ``finish``: what a trainer holds of memlog."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from memlog._internal import current_session, fork
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError, MemlogError
from memlog.events import Batch, Event, Status
from memlog.session.arguments import (
    BackendArgument,
    folder,
    passed,
    require_model,
    require_wait,
    split_backends,
)
from memlog.session.exit_status import error_at_exit, finish_with_the_child, status_of
from memlog.settings import Settings, resolve
from memlog.sink import Sink

if TYPE_CHECKING:
    from memlog.session.recording import AlertCallback, Recording

_SETTLE_AT_MOST = 2.0
"""Seconds that losses on their way from a device get at the end of a run."""

_current: Session | None = None
_current_lock = threading.RLock()
fork.renew(sys.modules[__name__], "_current_lock", threading.RLock)
_FORK_WAITS = 5.0
"""Seconds that a fork waits, at most, for another thread's ``init`` to be over."""


class Session:
    """One run: what `init` returns.

    It is a context manager: leaving the block ends the run, as failed where an exception leaves it. A
    session that is disabled has the same methods, and does nothing.

    Attributes:
        id: The run's id; ``None`` where disabled.
        directory: The run's folder; ``None`` where disabled.
        settings: What ``init`` made of its arguments.
        health: memlog's own drops and faults in this process.
    """

    def __init__(
        self,
        settings: Settings,
        sinks: Sequence[Sink],
        model: Any,
        on_alert: AlertCallback | None = None,
    ) -> None:
        self.settings = settings
        self.health = Diagnostics()
        self.id: str | None = None
        self.directory: Path | None = None
        self._live: Recording | None = None
        self._evaluations = itertools.count()
        if settings.enabled:
            self._record(sinks, model, on_alert)

    def _record(self, sinks: Sequence[Sink], model: Any, on_alert: AlertCallback | None) -> None:
        """Begins the run; what can't be begun for another reason than the user's is said, and counted."""
        try:
            # Imported here: `import memlog` stays light for those who never begin a session.
            from memlog.session.recording import Recording  # noqa: PLC0415

            live = Recording(
                self.settings, self.health, sinks, model, on_alert, _finish_first_at_exit
            )
        except MemlogError:
            raise
        except Exception as error:  # noqa: BLE001 - memlog's errors end here, not in training
            self.health.fault("beginning a run, of which nothing is recorded now,", error)
            return
        self._live, self.id, self.directory = live, live.run.id, live.run.path

    def abandon(self) -> None:
        """Leaves nothing of a run that nobody has: its `init` was interrupted."""
        live, self._live = self._live, None
        if live is not None:
            live.abandon()

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self._live is not None

    def step(self) -> None:
        """Says that a training step is over, where memlog can't or should not notice it by itself.

        From the first call on the caller alone counts: optimizer steps are no longer noticed. Call it once
        a step, after the optimizer's. Never raises.
        """
        if self._live is not None:
            self._live.batches.step_by_hand()

    def claim_steps(self) -> None:
        """Says that the caller counts the steps: optimizer steps are no longer noticed. Never raises.

        For what sees the loop from inside, such as a trainer's callbacks: call it before the first step,
        and `count_step` (or `step`) once a step.
        """
        if self._live is not None:
            self._live.claim_steps()

    def count_step(self) -> tuple[int, Batch | None] | None:
        """Like `step`, and tells the step's number, with its event where one was published."""
        return None if self._live is None else self._live.batches.count()

    def next_evaluation(self) -> int:
        """The number of the next evaluation of a loss function, from 0, counted across all of them."""
        return next(self._evaluations)

    @property
    def announced(self) -> bool:
        """Whether it has said on the console that monitoring is on."""
        return self._live is not None and bool(self.settings.verbose_batches)

    def publish(self, event: Event) -> None:
        """Puts an event of the caller's own on the bus. Never raises."""
        if self._live is not None:
            self._live.publish(event)

    def snapshot(self) -> None:
        """Traces the step that is now beginning, layer by layer, whatever the budget says. Never raises.

        Its figures, and its flame graph where it is the worst so far, follow when the step is over.
        """
        if self._live is not None:
            self._live.snapshot()

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str = "file", *, name: str | None = None
    ) -> Path | None:
        """Keeps a file for the run and brings it to every backend; ``memlog pull`` brings it back.

        It is copied into the run's folder before the call returns, so that the original may change or go.
        A later file of the same name and kind takes its place. Names are of letters, digits, ``.``, ``_``
        and ``-``; one that has to be changed, or that a file of another kind or name has already, gets its
        kind or a short digest in it, and that is said. Never raises: what can't be kept is said, once for
        each reason, and counted in the run's health.

        Args:
            path: The file.
            kind: What it is, in one word, such as ``"flamegraph"``, ``"snapshot"`` or ``"report"``.
            name: Its name in the run; ``None``: its own.

        Returns:
            The copy; ``None`` where nothing was kept.
        """
        if self._live is not None:
            return self._live.save_artifact(path, kind, name)
        if self.settings.enabled:
            self.health.drop_each(
                "artifact_not_kept",
                f"{str(path)[:500]!r} is not kept as an artifact: the run is over; "
                "save files before memlog.finish()",
            )
        return None

    def finish(self, status: Status = "finished", *, timeout: float | None = None) -> None:
        """Ends the run. Calling it again is harmless.

        Args:
            status: How it ended.
            timeout: Seconds to wait, at most, until trackers have everything; ``None``: the setting
                ``finish_timeout`` (10). What is missing then is delivered in the background, or by
                ``memlog sync``.

        Raises:
            ConfigurationError: the status or the timeout can't be right; the run then goes on.
        """
        if status not in ("finished", "failed", "killed"):
            raise ConfigurationError(
                f"status {status!r} is not known: pass 'finished', 'failed' or 'killed'"
            )
        require_wait(timeout)
        self._finish(status, timeout, sys.exc_info()[1])

    def _finish(self, status: Status, timeout: float | None, error: BaseException | None) -> None:
        wait = self.settings.finish_timeout if timeout is None else timeout
        if current_session.publisher() is self:
            current_session.settle(min(wait, _SETTLE_AT_MOST))
        live, self._live = self._live, None
        try:
            if live is not None:
                live.finish(status, wait, error)
        except KeyboardInterrupt:
            # The second one ends the waiting here; the first is on its way, with a traceback of the user's.
            if not isinstance(error, KeyboardInterrupt):
                raise
        finally:
            _forget(self)

    def __deepcopy__(self, _memo: object = None) -> Session:
        """The session itself: a run is one, however many copies of a trainer hold it."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it names its run and records nothing: the run is this process's."""
        return _elsewhere, (self.settings, self.id, self.directory)

    def __enter__(self) -> Session:  # noqa: PYI034 - typing.Self came with Python 3.11
        """The session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the run."""
        self._finish(status_of(error), None, error)


def _elsewhere(settings: Settings, run_id: str | None, directory: Path | None) -> Session:
    """What a pickled session becomes, in another process or later: one that is disabled."""
    session = Session(msgspec.structs.replace(settings, enabled=False), (), None)
    session.id, session.directory = run_id, directory
    return session


def _forget(session: Session) -> None:
    global _current  # noqa: PLW0603 - the session that memlog.finish() ends
    with _current_lock:
        if _current is session:
            _current = None
            current_session.set_publisher(None)


def init(
    backend: BackendArgument = None,
    *,
    project: str | None = None,
    name: str | None = None,
    model: Any = None,
    every: int = 1,
    alerts: str | Sequence[str] = (),
    on_alert: AlertCallback | None = None,
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - the trackers' own name for it
    config: Mapping[str, Any] | None = None,
    enabled: bool = True,
    initial_step: int = 0,
    layers: bool = False,
    budget: float = 0.01,
    finish_timeout: float = 10.0,
) -> Session:
    """Begins to record this process's memory; a running session is ended first.

    An unchanged PyTorch loop then gives one event a step. It waits for no tracker: everything that could
    wait happens in a helper process.

    Args:
        backend: ``"mlflow"``, ``"wandb"``, ``"local"`` (the journal alone), a `Sink` of your own, or
            several of these. ``None``: join the runs that you open in any tracker that is installed, and
            keep the journal in any case.
        project: The tracker's experiment for a run that memlog opens; ``None``: the tracker's default.
        name: That run's name.
        model: The model, whose size is recorded with the run's parameters.
        every: Publish a batch event at every so many steps.
        alerts: Rules as text, such as ``"host.rss > 80%"`` or ``"device.allocated > 90% for 5 steps"``;
            `memlog.alerts.rules` has the whole grammar.
        on_alert: Called with each `memlog.events.Alert` about the process or its devices, on the thread
            that made the step; what ``host.tree`` and ``host.available`` raise comes from the helper
            process and is called on a thread of memlog's. What it raises, ``sys.exit`` too, is counted
            and goes no further: a rule does not end training. Ctrl-C that comes while it is at work ends
            an ordinary loop as ever; inside `watch_loss` it is held back and said, since some optimisers
            hang for ever on an exception in their loss.
        dir: The folder for runs; ``None``: ``$MEMLOG_DIR`` or ``./memlog_runs``.
        config: Settings as a plain mapping, by these names or by those of the monitors that memlog
            takes over (``enable_memory_monitoring``, ``memory_monitor_batches``). An argument that
            differs from its default goes before it.
        enabled: ``False`` installs nothing: every call is then next to free.
        initial_step: Number of the first step, where training resumes.
        layers: Trace a training step now and then, layer by layer: whose memory it is. The first and the
            third are, from ``model``'s first call on (without ``model``: that of the first module that is
            called) until every optimizer has stepped.
        budget: Share of training time that the later ones may cost, 0 to 1.
        finish_timeout: Seconds that `finish` waits, at most, until trackers have everything; if none can be
            reached, it leaves the rest to the helper process after 2 s.

    Returns:
        The session, which is also a context manager.

    Raises:
        ConfigurationError: an argument can't be right; the message says what to pass.
        UnknownBackendError: nobody provides that backend.
        MissingExtraError: the backend's client is not installed.
        UnwritableDirectoryError: the folder for runs can't be written.
    """
    global _current  # noqa: PLW0603 - the session that memlog.finish() ends
    names, sinks = split_backends(backend)
    if on_alert is not None and not callable(on_alert):
        raise ConfigurationError(f"on_alert={on_alert!r}: pass a function that takes an alert")
    require_model(model)
    arguments = {
        "backends": names,
        "project": project,
        "name": name,
        "every": every,
        "alerts": tuple(alerts) if isinstance(alerts, list) else alerts,
        "directory": folder(dir),
        "enabled": enabled,
        "initial_step": initial_step,
        "layers": layers,
        "budget": budget,
        "finish_timeout": finish_timeout,
    }
    settings = resolve(passed(arguments), config)
    with _current_lock:
        if settings.alerts:
            # A wrong one raises, also where monitoring is switched off.
            with suppress(OSError):  # no file can be opened: the session says what that means
                from memlog.alerts import parse_rules  # noqa: PLC0415 - for those who have rules

                parse_rules(settings.alerts)
        # May raise: then the one before goes on.
        session = Session(settings, sinks, model, on_alert)
        try:
            if settings.enabled and not session.enabled:
                return session  # it has said why; the one before goes on
            if _current is not None:
                _current.finish(timeout=0)
        except BaseException:  # Ctrl-C, or what another signal's handler raised
            session.abandon()
            raise
        _current = session
        current_session.set_publisher(session)
    finish_with_the_child(session.finish)
    return session


def finish(status: Status = "finished") -> None:
    """Ends the running session, where there is one; see `Session.finish`."""
    session = _current
    if session is not None:
        session.finish(status)


def snapshot() -> None:
    """Traces the running session's next step; see `Session.snapshot`."""
    session = _current
    if session is not None:
        session.snapshot()


def _before_fork() -> None:
    """A module that another thread is importing is half a module for ever in the child: so it waits."""
    _current_lock.acquire(timeout=_FORK_WAITS)


def _after_fork() -> None:
    with suppress(RuntimeError):  # another thread's `init` still holds it
        _current_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


@atexit.register
def _finish_at_exit() -> None:
    session = _current
    try:
        if session is not None:
            error = error_at_exit()
            with suppress(
                KeyboardInterrupt
            ):  # it ends the waiting: there is nothing else left to end
                session._finish(status_of(error), None, error)  # noqa: SLF001 - this module's own
    finally:
        launcher = sys.modules.get("memlog.delivery.helper.client")
        if launcher is not None:
            launcher.let_go()


def _finish_first_at_exit() -> None:
    """A tracker whose run is written in process ends it at exit: memlog's last values have to come before.

    The handlers run in the opposite order of their registration.
    """
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)
