"""What is said to the user as a run ends: what was lost, what is left, and where its end is explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.journal import RunDirectory

if TYPE_CHECKING:
    from memlog.delivery.helper.client import Outcome
    from memlog.journal.delivery_state import UploadState

_SHOWN = 5
"""Rules that a line names."""
_SAY_WAITING_AFTER = 1.0
"""Seconds of waiting in ``finish`` after which a line says for what."""
_UNREACHABLE_AFTER = 2.0
"""Seconds after which ``finish`` leaves the rest to the helper if no tracker can be reached."""
_LOOK_EVERY = 0.2
"""Seconds between looks at how delivery is going."""


class Waiting:
    """Prints once that ``finish`` is waiting, and tells when that is of no use.

    Args:
        run: The run.
        timeout: Seconds that ``finish`` waits at most.
        diagnostics: Counts errors while the state of delivery is read.
    """

    def __init__(self, run: RunDirectory, timeout: float, diagnostics: Diagnostics) -> None:
        self._run = run
        self._timeout = timeout
        self._diagnostics = diagnostics
        self._said = False
        self._next_look = _UNREACHABLE_AFTER
        self._failed = {state.backend: state.failed_attempts for state in _states(run, diagnostics)}

    def __call__(self, waited: float) -> bool:
        """Whether no tracker that lacks something can be reached.

        Args:
            waited: Seconds since the waiting began.
        """
        if waited >= _SAY_WAITING_AFTER and not self._said:
            self._said = True
            say(f"delivering the last points (at most {self._timeout:g} s)")
        if waited < self._next_look:
            return False
        self._next_look = waited + _LOOK_EVERY
        unfinished = [s for s in _states(self._run, self._diagnostics) if s.stage != "done"]
        return bool(unfinished) and all(map(self._failed_again, unfinished))

    def _failed_again(self, state: UploadState) -> bool:
        """Whether an attempt has failed since the waiting began: an older failure says nothing of now."""
        failed_before = self._failed.get(state.backend, 0)
        return state.stage == "unreachable" and state.failed_attempts > failed_before


def say_never_judged(rules: Mapping[str, str]) -> None:
    """Names alert rules that nothing could be said of: silence would pass for all being well.

    Args:
        rules: Why, by the rule.
    """
    if rules:
        shown = _first(f"{rule!r} ({why})" for rule, why in rules.items())
        say(f"never judged in this run: {shown}")


def say_no_longer_judged(rules: Sequence[str]) -> str:
    """Names alert rules that only the helper process can judge, which is gone; returns why."""
    if rules:
        shown = _first(map(repr, rules))
        say(f"no longer judged since the helper process ended: {shown}")
    return "no longer, since the helper process ended"


def _first(told: Iterable[str]) -> str:
    parts = list(told)
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def say_what_was_lost(run: RunDirectory, diagnostics: Diagnostics) -> None:
    """A journal that was cut short can't tell: its last words found no room either."""
    lost = sum(n for reason, n in diagnostics.dropped.items() if reason.startswith("journal_"))
    if lost:
        say(f"{lost} events of run {run.id} could not be written and are lost")


def say_what_is_left(
    run: RunDirectory, outcome: Outcome, waited: float, linger: float, diagnostics: Diagnostics
) -> None:
    """Print what the trackers lack, and how they get it.

    Args:
        run: The run.
        outcome: What has become of delivery.
        waited: Seconds that were waited for it; with 0 nobody wants to know.
        linger: Seconds that the helper process keeps trying.
        diagnostics: Counts what goes wrong meanwhile.
    """
    report = run.artifacts / "postmortem.md"
    if _is_there(report, otherwise=False):
        say(f"how the run ended is explained in {report}")
    # Where the run's folder is gone there is nothing to bring.
    there = _is_there(run.path, otherwise=True)
    refused = _refused(run, diagnostics) if outcome == "dead" and there else []
    for problem in refused:
        say(problem)
    if outcome == "dead" and there and not refused:
        say(
            "the helper process ended before everything was delivered: "
            f"`memlog sync {run.id}` brings what is left"
        )
    elif outcome == "at work" and waited:
        say(
            f"not everything is delivered after {waited:.3g} s{_problems(run, diagnostics)}; it goes on "
            f"in the "
            f"background: `memlog show {run.id}` says how far it is, `memlog sync {run.id}` brings what is "
            "left"
        )
    elif outcome == "unreachable":
        say(
            f"not everything is delivered{_problems(run, diagnostics)}: the helper process tries for "
            f"{linger:g} s more; `memlog sync {run.id}` delivers what is left after that"
        )


def _is_there(path: Path, *, otherwise: bool) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way can't be searched, or its server is away
        return otherwise


def _refused(run: RunDirectory, diagnostics: Diagnostics) -> list[str]:
    """Which runs trackers refuse, where the helper has delivered all but what is for these."""
    states = [state for state in _states(run, diagnostics) if state.stage == "waiting"]
    return [f"{state.backend}: {state.problem}" for state in states if state.refused]


def _problems(run: RunDirectory, diagnostics: Diagnostics) -> str:
    """Why delivery takes its time, as far as the helper has written that down."""
    problems = [f"{s.backend}: {s.problem}" for s in _states(run, diagnostics) if s.problem]
    return f" ({'; '.join(problems)})" if problems else ""


def _states(run: RunDirectory, diagnostics: Diagnostics) -> list[UploadState]:
    """How far delivery to each tracker is, as the helper has written it down."""
    from memlog.journal.delivery_state import read_states  # noqa: PLC0415 - at the end of a run alone

    states: list[UploadState] = []
    with diagnostics.contained("reading how far delivery is"):
        states += read_states(run)
    return states
