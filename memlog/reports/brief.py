"""A run in a few lines for agents: its verdict, the cause, the place, the remedy, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from memlog._internal.diagnostics import REPORT_STEPS
from memlog._internal.terminal import one_line
from memlog.events import POSTMORTEM_FILE
from memlog.growth.evidence import FEWEST_LEVELS
from memlog.journal import RunDirectory
from memlog.journal.artifacts import read_postmortem
from memlog.reports.postmortem import first_advice
from memlog.reports.schema import Summary

MOST_TOKENS = 300
"""Maximum tokens of all lines together, as `tokens` counts them."""
_VERDICT = 130
"""Maximum tokens of the verdict."""
_PLACE = 40
_LEAST_CAUSE = 40
_NEXT = 130
_ENDS = 6
"""Number of lines, each of which has an end."""
_CUT = "…"
_PIECE = re.compile(r"[A-Za-z]{1,4}|[!-~\n]|[^\x00-\x7f]")
"""What counts as a token: up to four letters, one digit, one sign, the end of a line. A character outside
ASCII counts by its bytes."""


def tokens(text: str) -> int:
    """Return about how many tokens a language model makes of a text, rather too many than too few.

    Tokenizers differ. Most make one token of a word of prose, and several of a name in code and of a number.
    """
    pieces: list[str] = _PIECE.findall(text)
    return sum(len(piece.encode("utf-8", "replace")) if piece > "~" else 1 for piece in pieces)


def brief(run: RunDirectory, summary: Summary) -> list[str]:
    """Return a run's verdict, cause, place, remedy and next step, a line each, in at most `MOST_TOKENS`.

    A line of which nothing is known is left out. A long line is cut, but never a command.
    """
    steps = f"{summary.steps:,} {'step' if summary.steps == 1 else 'steps'}"
    about = one_line(f"run: {run.id}, {summary.status}, {steps}")
    following = one_line(_following(run, summary))
    finding = summary.findings[0] if summary.findings else None
    has_failed = summary.status in ("failed", "killed")
    place = finding.where if finding else summary.failed_at if has_failed else None
    left = MOST_TOKENS - tokens(about) - tokens(following) - _ENDS
    verdict = _line("verdict", summary.verdict, min(left, _VERDICT))
    where = _line("place", place, _PLACE)
    left -= tokens(verdict) + tokens(where)
    remedy = _line("remedy", _first_remedy(run, summary), left - (_LEAST_CAUSE if finding else 0))
    cause = ""
    if finding is not None:
        kind = f"{finding.kind.replace('_', ' ')}, {finding.confidence} confidence"
        evidence = " ".join(f"{statement.rstrip('.')}." for statement in finding.evidence)
        told = f"{kind}: {evidence}" if evidence else kind
        cause = _line("cause", told, left - tokens(remedy))
    return [line for line in (verdict, cause, where, remedy, about, following) if line]


def _line(name: str, text: str | None, most: int) -> str:
    """Return a line of at most ``most`` tokens; empty if there is no text, or no room for it."""
    if not text:
        return ""
    line = f"{name}: {one_line(text)}"
    if tokens(line) <= most:
        return line
    words = line.split(" ")
    while words and tokens(" ".join(words) + _CUT) > most:
        words.pop()
    return " ".join(words) + _CUT if len(words) > 1 else ""


def _following(run: RunDirectory, summary: Summary) -> str:
    """Return the line that says what to do next, without what is too long: a path can have any length."""
    line = ""
    for advised in _next(run, summary):
        longer = f"{line}; {advised}" if line else f"next: {advised}"
        line = longer if tokens(longer) <= _NEXT else line
    return line


def _first_remedy(run: RunDirectory, summary: Summary) -> str | None:
    """Return what to do about the main finding; else the first advice of the report on a bad end."""
    for finding in summary.findings[:1]:
        if finding.remedy:
            return finding.remedy
    text = read_postmortem(run)
    return None if text is None else first_advice(text)


def _next(run: RunDirectory, summary: Summary) -> Iterator[str]:
    """Yield what a reader does next."""
    failed = summary.failed_rank
    if failed is not None and failed.run is not None:
        other = RunDirectory(run.path.parent / failed.run)
        yield f"`{other.command('show')} --brief`, the rank that failed first"
        return
    if summary.status == "running":
        yield f"`{run.command('show')} --brief` again, because the run goes on"
        return
    if not summary.steps:
        yield f"if it trains, {REPORT_STEPS}"
        return
    has_report = any(artifact.name == POSTMORTEM_FILE for artifact in summary.artifacts)
    if has_report:
        yield f"read {shlex.quote(str(run.artifacts / POSTMORTEM_FILE))}"
    if summary.findings:
        yield f"change the program, train again, then `{run.command('compare')} latest`"
    elif run.worst_step.exists():
        yield f"`{run.command('advise')}` for what would lower the peak"
    elif not has_report and summary.outcome == "too few steps":
        yield f"train for {FEWEST_LEVELS} steps or more"
    elif not has_report and summary.outcome == "unsure":
        yield "train for more steps; memlog then looks for the cause"
    elif summary.traced.untraced is not None:
        yield f"`{run.command('show')}` tells why no step was traced, and the budget that traces the first"
    else:
        yield "`memlog run --layers -- COMMAND` for the layers that hold the peak"
