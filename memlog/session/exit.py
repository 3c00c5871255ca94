"""End of a run: its status, derived from the exception being raised, and the messages printed then."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from memlog._internal import processes
from memlog._internal.current_session import ONE_LINE
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.events import LOST_CONNECTION, POSTMORTEM_FILE, Status
from memlog.facts.run_verdict import RunVerdict
from memlog.journal import Binding, RunDirectory
from memlog.journal.delivery_state import UploadState, read_states
from memlog.journal.run_names import tracker_runs
from memlog.oom.errors import exiting
from memlog.sink import LOCAL, WEBHOOK

if TYPE_CHECKING:
    from memlog.delivery.helper.client import Outcome
    from memlog.session.rank import SessionRank

_LOST_CONNECTION = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote process exited|pair closure|ncclRemoteError"
    r"|Timed out waiting \d+ms|collective operation timeout|communicator was aborted|Socket Timeout"
    r"|failed to (?:recv|send)"
)
"""Messages of torch.distributed (gloo, NCCL, TCPStore) about another process that is gone."""


def reason_of(status: Status, error: BaseException | None) -> str | None:
    """Return `LOST_CONNECTION` or the exception's type for a failed run; ``None`` for other ends.

    The exception's message is left out, because it may contain the user's data.
    """
    if status != "failed" or error is None:
        return None
    # torch.distributed raises RuntimeError and classes derived from it.
    if isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)):
        return LOST_CONNECTION
    return type(error).__name__


def status_of(error: BaseException | None) -> Status:
    """Return ``finished`` for ``None`` or ``sys.exit(0)``, ``killed`` if interrupted, else ``failed``."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "killed" if isinstance(error, KeyboardInterrupt) or _is_cancelled(error) else "failed"


def error_at_exit() -> BaseException | None:
    """Return the exception that ended a script that never called ``finish``.

    Errors in an interactive shell do not count. At exit, Python does not report ``sys.exit(1)``. A script
    that ends with ``sys.exit(1)`` therefore counts as finished. The script counts as failed if this
    ``SystemExit`` leaves a session's ``with`` block, or if an allocation on a device has failed since the
    last complete step (`memlog.oom.errors`).
    """
    if hasattr(sys, "ps1"):
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return exiting() if error is None else error


def is_a_child_of_multiprocessing() -> bool:
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def finish_with_the_child(finish: Callable[[Status], None]) -> None:
    """Call ``finish`` with the status of this ``multiprocessing`` child when the child ends.

    The child may skip Python's exit handlers, but the child runs its finalizers. A finalizer knows the
    status, because the child's exception is then still being raised.
    """
    if not is_a_child_of_multiprocessing():
        return
    from multiprocessing.util import Finalize  # noqa: PLC0415 - already imported in such a child

    Finalize(None, lambda: finish(status_of(sys.exc_info()[1])), exitpriority=100)
    _finish_with_the_pool(finish)


def _finish_with_the_pool(finish: Callable[[Status], None]) -> None:
    """Call ``finish`` if this is a worker of a ``Pool`` that is ended while it waits for a task.

    ``with Pool() as pool:`` ends the workers by SIGTERM when all tasks are done. Without a handler, the run
    of a training that is complete would count as killed. A worker that is ended within a task, and one with
    a handler of the program's, end as before.
    """
    if (
        "multiprocessing.pool" not in sys.modules
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    import inspect  # noqa: PLC0415 - torch has loaded it, `import memlog` need not
    from multiprocessing.pool import worker  # type: ignore[attr-defined] # noqa: PLC0415 - loaded already

    def calls_until_the_pools_loop(frame: FrameType | None) -> list[str] | None:
        """Return the modules of the calls made by the loop, inner first; ``None`` outside of the loop."""
        modules: list[str] = []
        while frame is not None and frame.f_code is not worker.__code__:
            modules.append(str(frame.f_globals.get("__name__")))
            frame = frame.f_back
        return None if frame is None else modules

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        modules = calls_until_the_pools_loop(frame)
        if modules is None:
            return  # the loop has ended, so the finalizers are running: the process ends after `finish`
        if all(module.startswith("multiprocessing.") for module in modules):
            finish("finished")
        os.kill(os.getpid(), number)

    if calls_until_the_pools_loop(inspect.currentframe()) is not None:
        signal.signal(signal.SIGTERM, end)


def _is_cancelled(error: BaseException) -> bool:
    """Return True if the error is the cancellation of an asyncio task.

    If the user presses Ctrl-C, a coroutine gets this error instead of KeyboardInterrupt. Later, `asyncio.run`
    raises KeyboardInterrupt in the code that called it.
    """
    exceptions = sys.modules.get("asyncio.exceptions")
    return exceptions is not None and isinstance(error, exceptions.CancelledError)


_PRINT_AFTER = 1.0
"""Seconds after which ``finish`` prints that it waits for delivery."""
_UNREACHABLE_AFTER = 2.0
"""Seconds after which ``finish`` stops waiting if no tracker can be reached. The helper process continues."""
_LOOK_EVERY = 0.2
"""Seconds between checks of the delivery state."""


class Waiting:
    """Callback that ``finish`` calls again and again while it waits for delivery.

    ``finish`` waits at most ``timeout`` seconds. The callback prints one line, unless ``quiet`` is True. It
    ends the waiting early if no tracker can be reached.
    """

    def __init__(
        self, run: RunDirectory, timeout: float, diagnostics: Diagnostics, *, quiet: bool
    ) -> None:
        self._run = run
        self._timeout = timeout
        self._diagnostics = diagnostics
        self._printed = quiet
        self._next_look = _UNREACHABLE_AFTER
        self._failed = {state.backend: state.failed_attempts for state in _states(run, diagnostics)}

    def __call__(self, waited: float) -> bool:
        """Return True if all trackers that still lack data are unreachable. True ends the waiting.

        ``waited`` is the number of seconds since the waiting began.
        """
        if waited >= _PRINT_AFTER and not self._printed:
            self._printed = True
            say(f"delivering the last points (at most {self._timeout:g} s)")
        if waited < self._next_look:
            return False
        self._next_look = waited + _LOOK_EVERY
        unfinished = [s for s in _states(self._run, self._diagnostics) if s.stage != "done"]
        return bool(unfinished) and all(map(self._failed_again, unfinished))

    def _failed_again(self, state: UploadState) -> bool:
        """Return True if an attempt failed after the waiting began. Older failures are no longer relevant."""
        failed_before = self._failed.get(state.backend, 0)
        return state.stage == "unreachable" and state.failed_attempts > failed_before


def print_end(
    run: RunDirectory, verdict: RunVerdict | None, *, has_data: bool, silent: bool, one_line: bool
) -> None:
    """Print the last lines: the verdict, what to do, and how to view the run.

    ``verdict`` is ``None`` if it is unknown. If ``silent``, it is printed if it is a finding, and nothing
    else is. If ``one_line``, a verdict without a finding is on one line with the command that shows the run.
    ``has_data``: True if the run has steps or other events.
    """
    finding = None if verdict is None else verdict.finding
    if one_line and has_data and verdict is not None and finding is None and run.path.exists():
        say(f"{verdict.text} Run {run.id}: `{run.command('show')}`")
        return
    if verdict is not None and (has_data if not silent else finding is not None):
        position = processes.rank_position() if silent else None
        of = "" if position is None else f"rank {position.rank}: "
        say(f"{of}{verdict.text}")
        if finding is not None and finding.remedy:
            say(f"{of}what to do: {finding.remedy}")
        for title in verdict.parts:
            say(f"{of}also: {title}")
    if not silent:
        for line in _links(run, has_data=has_data):
            say(line)


def _links(run: RunDirectory, *, has_data: bool) -> list[str]:
    """Return a line for each tracker's run. If no tracker has a run, return the command to show memlog's run.

    If memlog's run has no data, the command is left out.
    """
    runs = tracker_runs(run) if run.path.exists() else {}
    runs.pop(WEBHOOK, None)
    if runs:
        return [described(*entry) for entry in runs.items()]
    return [f"run {run.id}: `{run.command('show')}`"] if has_data and run.path.exists() else []


def print_lost_events(run: RunDirectory, diagnostics: Diagnostics) -> None:
    """Print the number of events that could not be written to the journal."""
    lost = sum(n for reason, n in diagnostics.dropped.items() if reason.startswith("journal_"))
    if lost:
        say(f"{lost} events of run {run.id} could not be written and are lost")


def print_undelivered(
    run: RunDirectory, outcome: Outcome, waited: float, linger: float, diagnostics: Diagnostics
) -> None:
    """Print the path of the post-mortem, if it exists, and how to deliver the data that is not delivered.

    ``waited``: seconds that the caller waited for delivery. ``linger``: seconds that the helper process
    continues to try.
    """
    report = run.artifacts / POSTMORTEM_FILE
    if report.exists():
        say(f"how the run ended is explained in {report}")
    # If the run's folder no longer exists, nothing can be delivered.
    there = run.path.exists()
    refused = _refused(run, diagnostics) if outcome == "dead" and there else []
    for problem in refused:
        say(problem)
    if outcome == "dead" and there and not refused:
        say(
            "the helper process ended before everything was delivered: "
            f"`{run.command('sync')}` delivers the rest"
        )
    elif outcome == "at work" and waited:
        say(
            f"not everything is delivered after {waited:.3g} s{_problems(run, diagnostics)}; delivery "
            f"continues in the background: `{run.command('show')}` shows its progress; if that stops, "
            f"`{run.command('sync')}` delivers the rest"
        )
    elif outcome == "unreachable":
        say(
            f"not everything is delivered{_problems(run, diagnostics)}: the helper process tries for "
            f"{linger:g} s more; after that, `{run.command('sync')}` delivers the rest"
        )


def _refused(run: RunDirectory, diagnostics: Diagnostics) -> list[str]:
    """Return a line for each tracker that refuses all runs with undelivered data.

    The line contains the tracker's name, and the reason for the refusal.
    """
    states = [state for state in _states(run, diagnostics) if state.stage == "waiting"]
    return [f"{state.backend}: {state.problem}" for state in states if state.refused]


def _problems(run: RunDirectory, diagnostics: Diagnostics) -> str:
    """Return the reasons for slow delivery that the helper process has recorded."""
    problems = [f"{s.backend}: {s.problem}" for s in _states(run, diagnostics) if s.problem]
    return f" ({'; '.join(problems)})" if problems else ""


def _states(run: RunDirectory, diagnostics: Diagnostics) -> list[UploadState]:
    states: list[UploadState] = []
    with diagnostics.contained("reading how far delivery is"):
        states += read_states(run)
    return states


class RunMessages:
    """Printer of one line per run of a tracker. No method raises."""

    def __init__(self, run: RunDirectory, rank: SessionRank, diagnostics: Diagnostics) -> None:
        self._run = run
        self._rank = rank
        self._diagnostics = diagnostics
        self._awaited = set(rank.wanted.backends) - {LOCAL}
        self._joined: set[tuple[str, str]] = set()

    def begun(self) -> None:
        """Print the run's folder if the run goes to no tracker."""
        if self._rank.wanted.backends == (LOCAL,):
            run = self._run
            self._say(f"run {run.id} is recorded in {run.path}: `{run.command('watch')}`")

    def joined(self, backend: str, binding: Binding) -> None:
        """Print that the session has joined the user's run ``binding``. Print this once for each run."""
        self._awaited.discard(backend)
        # A loop may return to the same run many times, for example to the parent of nested runs.
        if (backend, binding.run_id) not in self._joined:
            self._joined.add((backend, binding.run_id))
            self._say(f"run {self._run.id} joined {described(backend, binding)}")

    def look(self) -> None:
        """Print each run that memlog has opened, as soon as the helper process has saved the run's id."""
        for backend in () if self.is_silent else tuple(self._awaited):
            own = UploadState.load(self._run, backend).own_run
            if own is not None:
                self._awaited.discard(backend)
                self._say(f"run {self._run.id} opened {described(backend, own)}")

    @property
    def is_silent(self) -> bool:
        """True if no line is printed when the run begins.

        The session is ``quiet``, or this rank does not deliver its run to trackers.
        """
        return bool(self._rank.wanted.quiet) or not self._rank.may_deliver

    @property
    def has_one_line(self) -> bool:
        """True if the session prints only one line about the run, at its end."""
        return self._rank.wanted.quiet == ONE_LINE and self._rank.may_deliver

    def _say(self, line: str) -> None:
        with self._diagnostics.contained("printing which run is recorded"):
            if not self.is_silent:
                say(line)


def described(backend: str, run: Binding) -> str:
    """Return the tracker, name and link (a web address or a command) of a run as text."""
    name = run.run_id if run.name is None else repr(run.name)
    if run.link is None:
        return f"{backend} run {name}"
    link = run.link if "://" in run.link.partition(" ")[0] else f"`{run.link}`"
    return f"{backend} run {name}: {link}"
