"""Messages printed when a run ends: verdict, how to view the run, and what is not delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlog._internal import distributed
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.events import POSTMORTEM_FILE
from memlog.facts.run_verdict import RunVerdict
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import UploadState, read_states
from memlog.journal.run_names import tracker_runs
from memlog.session.run_messages import described

if TYPE_CHECKING:
    from memlog.delivery.helper.client import Outcome

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
    found = None if verdict is None else verdict.finding
    if one_line and has_data and verdict is not None and found is None and run.path.exists():
        say(f"{verdict.text} Run {run.id}: `{run.command('show')}`")
        return
    if verdict is not None and (has_data if not silent else found is not None):
        position = distributed.rank_position() if silent else None
        of = "" if position is None else f"rank {position.rank}: "
        say(f"{of}{verdict.text}")
        if found is not None and found.remedy:
            say(f"{of}what to do: {found.remedy}")
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
    if runs:
        return [described(*each) for each in runs.items()]
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
