"""Session that records one run: `init` begins it, `finish` ends it."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memlog._internal import current_session as running
from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError, MemlogError
from memlog.events import Status
from memlog.session.arguments import (
    BackendArgument,
    passed,
    require_model,
    require_wait,
    split_backends,
)
from memlog.session.exit import error_at_exit, finish_with_the_child, status_of
from memlog.session.trainers import TrainerInterface
from memlog.settings import Settings, resolve
from memlog.sink import LOCAL, Sink

if TYPE_CHECKING:
    from memlog.session.recording import Recording
    from memlog.session.recording_parts import AlertCallback


class SessionDisplay:
    """Text and HTML of a session. No method raises."""

    id: str | None
    directory: Path | None
    settings: Settings
    health: Diagnostics
    _live: Recording | None

    def __repr__(self) -> str:
        """Return text with memlog's run, the trackers' runs that belong to it, and the session's state."""
        if self.id is None or self.directory is None:
            state = "recording nothing" if self.settings.enabled else "disabled"
            return f"<memlog.Session {state}>"
        parts = [f"run {self.id}"]
        with self.health.contained("describing a session"):
            parts += self._trackers(self.directory)
            parts.append(self._state())
        return f"<memlog.Session {', '.join(parts)}>"

    def _state(self) -> str:
        if self._live is None:
            return "ended"
        step = self._live.batches.last_step
        return "recording, no step yet" if step is None else f"recording, step {step:,}"

    def _trackers(self, directory: Path) -> list[str]:
        # Imported here to keep `import memlog` light.
        from memlog.journal import RunDirectory  # noqa: PLC0415
        from memlog.journal.run_names import tracker_runs  # noqa: PLC0415

        runs = tracker_runs(RunDirectory(directory)) if directory.exists() else {}
        waiting = [name for name in self.settings.backends if name not in {LOCAL, *runs}]
        return [
            *(f"{name} run {run.name or run.run_id!r}" for name, run in runs.items()),
            *(f"no {name} run yet" for name in waiting),
        ]

    def _repr_html_(self) -> str | None:
        """Return the report of the run so far; ``None`` makes a notebook show the text of `__repr__`."""
        if self.directory is not None and self.directory.exists():
            from memlog.reports.notebook import run_html  # noqa: PLC0415 - only notebooks need it

            with self.health.contained("showing a session"):
                return run_html(self.directory)
        return None


_SETTLE_AT_MOST = 2.0
"""Maximum seconds to wait at the end of a run for losses that are still being copied from a device."""

_current: Session | None = None
_current_lock = threading.RLock()
processes.renew(sys.modules[__name__], "_current_lock", threading.RLock)


class Session(TrainerInterface, SessionDisplay):
    """Session that records one run; returned by `init`.

    A session is a context manager. The end of the ``with`` block ends the run. The run's status is then
    ``finished``, ``killed`` after Ctrl-C, or ``failed`` after another exception. A disabled session has the
    same methods, and they do nothing.

    Attributes:
        id: The run's id; ``None`` if disabled.
        directory: The run's folder; ``None`` if disabled.
        settings: Settings that resulted from ``init``'s arguments.
        health: Counts of lost events, points and files, and of memlog's own errors, in this process.
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
        """Begin the run. Log and count an internal failure instead of raising it."""
        # Without a free descriptor nothing can be looked at, and the run says why it can't begin.
        with (
            self.health.contained("looking for another distribution of the name memlog"),
            suppress(ImportError, OSError),
        ):
            from memlog._internal.installation import warn_once  # noqa: PLC0415 - see below

            warn_once()
        try:
            # Imported here to keep `import memlog` light for programs that never begin a session.
            from memlog.session.recording import Recording  # noqa: PLC0415

            recording = Recording(
                self.settings, self.health, sinks, model, on_alert, _finish_first_at_exit
            )
        except MemlogError:
            raise
        except Exception as error:  # noqa: BLE001 - memlog's errors end here, not in training
            self.health.fault("beginning a run (nothing is recorded)", error)
            return
        self._live = recording
        self.id, self.directory = recording.run.id, recording.run.path

    def abandon(self) -> None:
        """Delete a run whose `init` was interrupted."""
        recording, self._live = self._live, None
        if recording is not None:
            recording.abandon()

    @property
    def enabled(self) -> bool:
        """True if the session records."""
        return self._live is not None

    @property
    def records_here(self) -> bool:
        """True if the session records, and this process is no fork of the process that began the session."""
        return self._live is not None and self._live.generation == processes.generation

    def next_evaluation(self) -> int:
        """Return the number of the next evaluation, counted from 0 over all watched loss functions."""
        return next(self._evaluations)

    @property
    def announced(self) -> bool:
        """True if the session has printed that monitoring is on."""
        return self._live is not None and bool(self.settings.verbose_batches)

    def snapshot(self) -> None:
        """Trace the next step layer by layer, even if the tracing budget is used up. Never raises.

        memlog publishes the step's figures after the step. If the step needed more memory than any
        earlier traced step, memlog also makes a flame graph of the step.
        """
        if self._live is not None:
            self._live.snapshot()

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str = "file", *, name: str | None = None
    ) -> Path | None:
        """Save a file with the run, and upload it to each tracker that stores files.

        ``memlog pull`` fetches the file again. memlog copies the file into the run's folder before the call
        returns, so the original can be changed or deleted afterwards. A later file of the same name and kind
        replaces the earlier file. A name can hold ASCII letters, digits, ``.``, ``_`` and ``-``. memlog
        replaces all other characters by ``_``. If two files with different names or kinds would get the same
        name, memlog adds the kind or a short digest to the later name. memlog prints each changed name. Never
        raises: if a file can't be saved, memlog prints the reason once and counts the file in `health`.

        Args:
            path: The file.
            kind: Type of the file in one word, such as ``"flamegraph"``, ``"snapshot"`` or ``"report"``.
            name: Name in the run; ``None``: the file's own name.

        Returns:
            Path of the copy; ``None`` if nothing was saved.
        """
        if self._live is not None:
            return self._live.save_artifact(path, kind, name)
        if self.settings.enabled:
            self.health.drop_each(
                "artifact_not_kept",
                f"{str(path)[:500]!r} was not saved as an artifact: the run has ended; "
                "save files before memlog.finish()",
            )
        return None

    def finish(self, status: Status = "finished", *, timeout: float | None = None) -> None:
        """End the run. Calling it again has no effect.

        Args:
            status: How the run ended: ``finished``, ``failed`` or ``killed``.
            timeout: Maximum seconds to wait until the trackers have all data; ``None``: the setting
                ``finish_timeout`` (10). After that, delivery continues in the background, or with
                ``memlog sync``.

        Raises:
            ConfigurationError: The status or the timeout is invalid. The run then continues.
        """
        if status not in ("finished", "failed", "killed"):
            raise ConfigurationError(
                f"status {status!r} is not known: pass 'finished', 'failed' or 'killed'"
            )
        require_wait(timeout)
        self._finish(status, timeout, sys.exc_info()[1])

    def _finish(self, status: Status, timeout: float | None, error: BaseException | None) -> None:
        wait = self.settings.finish_timeout if timeout is None else timeout
        if running.publisher() is self:
            running.settle(min(wait, _SETTLE_AT_MOST))
        recording, self._live = self._live, None
        try:
            if recording is not None:
                recording.finish(status, wait, error)
        except BaseException as interruption:
            if recording is not None:
                recording.finish_after_interruption(status)
            # A second Ctrl-C only ends the wait for delivery. The first Ctrl-C is still being raised, with
            # the user's traceback.
            if not (
                isinstance(interruption, KeyboardInterrupt) and isinstance(error, KeyboardInterrupt)
            ):
                raise
        finally:
            _forget(self)

    def __deepcopy__(self, _memo: object = None) -> Session:
        """Return the session itself, because all copies of a trainer belong to the same run."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, and the run's id and folder. The recording stays in this process."""
        return _disabled_session, (self.settings, self.id, self.directory)

    def __enter__(self) -> Session:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._finish(status_of(error), None, error)


def _disabled_session(settings: Settings, run_id: str | None, directory: Path | None) -> Session:
    """Build a disabled session, as the result of loading a pickled session."""
    session = Session(msgspec.structs.replace(settings, enabled=False), (), None)
    session.id, session.directory = run_id, directory
    return session


def _forget(session: Session) -> None:
    global _current  # noqa: PLW0603 - the session that memlog.finish() ends
    with _current_lock:
        if _current is session:
            _current = None
            running.set_publisher(None)


def init(
    backend: BackendArgument = None,
    *,
    project: str | None = None,
    name: str | None = None,
    model: Any = None,
    every: int = 1,
    alerts: str | Sequence[str] = (),
    on_alert: AlertCallback | None = None,
    alert_webhook: str | None = None,
    dir: str | os.PathLike[str] | None = None,  # noqa: A002 - the trackers' own name for it
    config: Mapping[str, Any] | None = None,
    enabled: bool = True,
    initial_step: int = 0,
    layers: bool = False,
    budget: float = 0.01,
    finish_timeout: float = 10.0,
) -> Session:
    """Begin to record this process's memory. End the session that ran before, if there is one.

    An unchanged PyTorch loop then produces one event per step. The loop never waits for a tracker, because a
    helper process communicates with the trackers.

    Args:
        backend: ``"mlflow"``, ``"wandb"``, ``"tensorboard"``, ``"trackio"``, ``"swanlab"``, ``"otlp"``,
            ``"prometheus"``, ``"local"`` (the journal only), a `Sink` of your own, or several of these.
            ``None``: join the runs that you open in any installed tracker. The journal is written in every
            case.
        project: Experiment or project in the tracker, for a run that memlog opens; ``None``: the tracker's
            default.
        name: Name of memlog's run, and of a run that memlog opens in a tracker.
        model: The model, whose size is recorded with the run's parameters.
        every: Number of steps from one batch event to the next.
        alerts: Rules as text, such as ``"host.rss > 80%"`` or ``"device.allocated > 90% for 5 steps"``;
            `memlog.alerts.rules` describes the grammar.
        on_alert: Function called with each `memlog.events.Alert`. The helper process judges the rules. For
            alerts about the process or its devices, memlog calls the function at one of the next steps, on
            the thread that ended the step, or in ``finish``. For alerts of ``host.tree`` and
            ``host.available``, memlog calls the function on a separate thread. If the function raises an
            exception, even from ``sys.exit``, memlog counts the exception and training continues. Ctrl-C
            during the call ends an ordinary loop as usual. If Ctrl-C comes inside `watch_loss`, memlog prints
            a message and does not raise the interruption, because some optimisers hang on an exception in
            their loss.
        alert_webhook: Address to which the helper process posts each alert, as JSON; ``None``:
            ``$MEMLOG_ALERT_WEBHOOK``, or no webhook. Requests are signed with ``$MEMLOG_ALERT_WEBHOOK_KEY``.
            memlog writes neither to a file.
        dir: Folder for runs; ``None``: ``$MEMLOG_DIR`` or ``./memlog_runs``.
        config: Settings as a plain mapping. The keys are the fields of `memlog.settings.Settings`,
            ``backend``, ``dir``, or the keys of the monitors that memlog replaces
            (``enable_memory_monitoring``, ``memory_monitor_batches``). An argument that differs from its
            default overrides the mapping.
        enabled: ``False`` installs nothing, and every call costs almost nothing.
        initial_step: Number of the first step, for resumed training.
        layers: Trace a training step from time to time, to show each layer's memory: the first step, and the
            third step too if that is cheap. If the model has so many modules that the budget allows only a
            small part of the first step, memlog says so and traces a later one. A traced step begins with the
            first call of ``model``. If ``model`` is not passed, it begins with the first call of any module.
            It ends when every optimizer has stepped.
        budget: Fraction of training time that tracing may take, above 0 and up to 1. All traces count. Only
            the first two may begin before the run has earned them: together they may take this fraction of
            10 s, by default 0.1 s. A trace that takes longer covers the first part of its step.
        finish_timeout: Maximum seconds that `finish` waits until the trackers have all data. If no tracker
            can be reached, `finish` returns after 2 s, and the helper process continues to try.

    Returns:
        The session, which is also a context manager.

    Raises:
        ConfigurationError: An argument is invalid; the message says what to pass.
        UnknownBackendError: No installed package provides a backend of the given name.
        MissingExtraError: The backend's client is not installed.
        UnwritableDirectoryError: The folder for runs can't be written.
    """
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
        "alert_webhook": alert_webhook,
        "directory": dir,
        "enabled": enabled,
        "initial_step": initial_step,
        "layers": layers,
        "budget": budget,
        "finish_timeout": finish_timeout,
    }
    settings = resolve(passed(arguments), config)
    if settings.alerts:
        # A wrong rule raises even if monitoring is switched off. If the process can open no more files, the
        # import raises OSError. Session() then reports this error.
        with suppress(OSError):
            from memlog.alerts import parse_rules  # noqa: PLC0415 - needed only with rules

            parse_rules(settings.alerts)
    return _replace_session(lambda: Session(settings, sinks, model, on_alert))


def _replace_session(make: Callable[[], Session]) -> Session:
    """Make a session and end the running session. If no session can begin, the running one continues."""
    global _current  # noqa: PLW0603 - the session that memlog.finish() ends
    with _current_lock:
        session = make()
        try:
            if session.settings.enabled and not session.enabled:
                return session  # the reason is logged
            if _current is not None:
                _current.finish(timeout=0)
        except BaseException:  # Ctrl-C, or an exception of another signal's handler
            session.abandon()
            raise
        _current = session
        running.set_publisher(session)
    finish_with_the_child(session.finish)
    return session


def current_session() -> Session | None:
    """Return the session that records in this process now; ``None`` if there is none.

    The call costs almost nothing. In a process of ``memlog run`` the first call begins the session.
    """
    session = running.publisher()
    return session if isinstance(session, Session) and session.records_here else None


def finish(status: Status = "finished") -> None:
    """End the running session, if there is one; see `Session.finish`."""
    session = _current
    if session is not None:
        session.finish(status)


def snapshot() -> None:
    """Trace the running session's next step; see `Session.snapshot`."""
    session = _current
    if session is not None:
        session.snapshot()


@atexit.register
def _finish_at_exit() -> None:
    session = _current
    try:
        if session is not None:
            error = error_at_exit()
            with suppress(KeyboardInterrupt):  # Ctrl-C ends the wait, and nothing is left to do
                session._finish(status_of(error), None, error)  # noqa: SLF001 - this module's own
            if type(error) is KeyboardInterrupt:
                _end_by_interrupt()
    finally:
        client = sys.modules.get("memlog.delivery.helper.client")
        if client is not None:
            client.let_go()


def _end_by_interrupt() -> None:
    """Let Python end this process by SIGINT again, as after any ``KeyboardInterrupt`` that nothing caught.

    Python notes whether the last code compiled from text ended with this exception. Compiling more text, as
    modules with dataclasses do when they are imported, makes Python exit with status 1.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102 - a constant


def _finish_first_at_exit() -> None:
    """Register memlog's exit handler again, so that it runs before a tracker's exit handler.

    Some trackers end their run in an exit handler. If memlog writes to that run in this process, memlog must
    write before the run ends. Python calls exit handlers in the opposite order of their registration.
    """
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)
