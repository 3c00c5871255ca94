"""Judge what memlog says about a generated program: pure functions on records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

from benchmarks.insight.generated.programs import Program, Variant
from benchmarks.insight.scoring import Finding, names_place

REMOVED = 0.8
"""A remedy is right if at least this part of the growth goes away."""
SOON_STEPS, SOON_PERIODS = 64, 6
"""A leak is named soon within this number of steps, or of its periods, whichever is later."""
PART_OF_FREE = 0.05
"""A leak that is not named soon is named early enough if it has taken at most this part of free memory."""

_FIXES: dict[Variant, str] = {
    "bounded": r"\b[Ll]imit\b|^Remove\b|Keep a few|cache_clear",
    "detached": r"\.detach\(\)|\.item\(\)|no_grad|inference_mode",
}
"""For each variant of a program, the words of a remedy that asks for it."""


class Said(NamedTuple):
    """What memlog said about a run.

    Attributes:
        findings: The findings, the most important one first.
        verdict: The verdict.
        named_at: The first step at which a finding named the holder; None if none did.
        seconds: Seconds that the run took.
        error: Message of a failure; empty if the run did not fail.
        free: Bytes that were available when the run began.
    """

    findings: tuple[Finding, ...] = ()
    verdict: str = ""
    named_at: int | None = None
    seconds: float = 0.0
    error: str = ""
    free: float = 0.0


class Score(NamedTuple):
    """Judgement of a program's run with a leak, and of its healthy twin.

    Attributes:
        found: True if a finding has a rate.
        named: True if the first such finding names the holder.
        cause: True if its kind is right.
        remedy: True if it names the holder, and its remedy removes enough of the growth.
        soon: True if the holder was named soon, before the run's end.
        early: True if the holder was named early enough.
        false_alarm: True if there is a finding about the twin.
        unsure: True if the twin has none, but memlog does not call it steady.
        why: What is wrong, in words; empty if nothing is.
    """

    found: bool
    named: bool
    cause: bool
    remedy: bool
    soon: bool
    early: bool
    false_alarm: bool
    unsure: bool
    why: tuple[str, ...]


def fix_of(remedy: str | None) -> Variant | None:
    """Return the variant of a program that a remedy asks for first; None if it asks for neither."""
    at = {
        fix: found.start()
        for fix, words in _FIXES.items()
        if (found := re.search(words, remedy or ""))
    }
    return min(at.items(), key=itemgetter(1))[0] if at else None


def names_holder(finding: Finding, program: Program) -> bool:
    """Return True if a finding's title or place has the holder's name."""
    return names_place(Finding(finding.kind, finding.title, finding.where), [program.name])


def judge(program: Program, leak: Said, twin: Said, rises: Mapping[Variant, float]) -> Score:
    """Return the score. ``rises`` are bytes by which memory rises in each variant, without memlog."""
    first = next((each for each in leak.findings if each.tells_growth), None)
    named = first is not None and names_holder(first, program)
    cause = first is not None and first.kind in program.kept.kinds
    fix = None if first is None else fix_of(first.remedy)
    left = 1.0 if fix is None else rises.get(fix, rises["leak"]) / rises["leak"]
    remedy = named and left <= 1 - REMOVED
    steps = program.period + max(SOON_STEPS, SOON_PERIODS * program.period)
    soon = leak.named_at is not None and leak.named_at <= steps
    taken = program.rate * (program.steps if leak.named_at is None else leak.named_at)
    early = soon or (named and taken <= PART_OF_FREE * leak.free)
    alarms = [each for each in twin.findings if not _is_true_of_twin(each, program)]
    why = []
    if first is None:
        at = "the verdict has the holder" if program.name in leak.verdict else "no holder"
        why.append(f"not found ({at})")
    elif not named:
        why.append(f"holder not named ({first.kind})")
    elif not cause:
        why.append(f"wrong cause ({first.kind})")
    if named and not remedy:
        why.append(f"remedy leaves {left:.0%} of the growth ({fix or 'no fix'})")
    if named and not early:
        at = "at the end" if leak.named_at is None else f"at step {leak.named_at}"
        why.append(f"named late, {at}")
    why += [f"false alarm on the twin ({each.kind})" for each in alarms]
    unsure = not alarms and twin.verdict.startswith("Unsure")
    return Score(
        first is not None, named, cause, remedy, soon, early, bool(alarms), unsure, tuple(why)
    )


def _is_true_of_twin(finding: Finding, program: Program) -> bool:
    """Return True if a finding is right: a twin that keeps outputs with graphs evaluates with gradients."""
    wasteful = program.kept.sort == "graph" and finding.kind == "forward_without_backward"
    return wasteful and not finding.tells_growth
