"""Findings and failures in words: their rank, their sentence, their remedy. Every report renders these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, Protocol, TypeVar

from msgspec.structs import replace

from memlog._internal.terminal import format_bytes
from memlog.events import Finding, OutOfMemory

_GROWS = " grows"
_WILL = ", and memory runs out at "
_WOULD_HAVE = ", and memory would have run out at "
_CONFIDENCE = {"high": 0, "medium": 1, "low": 2}
_DEVICE = re.compile(r"^([a-z]+)\d+$")
_UNSURE = "Unsure: "
_PASSES = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}
_RANKS_NAMED = 8
"""Maximum number of ranks that a text lists. A text only counts further ranks."""
_PREDICATES = {
    "Out of memory": "ran out of memory",
    "Killed by": "was killed by",
    "Ended": "ended",
}
"""Beginnings of titles about a process, and the predicates for sentences about a rank."""


class Explained(Protocol):
    """Finding with its evidence: an event, or its form in a document."""

    @property
    def evidence(self) -> Sequence[str]: ...
    @property
    def confidence(self) -> Literal["high", "medium", "low"]: ...
    @property
    def remedy(self) -> str | None: ...


class Titled(Protocol):
    @property
    def title(self) -> str: ...


_Titled = TypeVar("_Titled", bound=Titled)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most important first.

    Of findings with the same kind and the same ``where``, those of the newest step are kept: several holders
    can be filled at one line. If one holder makes both the process's memory and a device's grow, those about
    the memory that runs out first are kept.

    Findings about growth come before findings about waste that does not grow. Within each group, known causes
    come first. Findings of equal rank are ordered by the step at which the limit can be reached, the earliest
    first, and then by growth, the fastest first.
    """
    newest: dict[tuple[str, str | None, str | None, int | None], dict[str, Finding]] = {}
    for each in findings:
        together = newest.setdefault((each.kind, each.where, each.memory, each.rank), {})
        if any(one.step != each.step for one in together.values()):
            together.clear()
        together[each.title] = each
    groups = [sorted(together.values(), key=_importance) for together in newest.values()]
    soonest: dict[tuple[str, str | None, int | None], list[Finding]] = {}
    for group in sorted(groups, key=lambda group: _importance(group[0])):
        soonest.setdefault((group[0].kind, group[0].where, group[0].rank), group)
    return sorted(_once(chain.from_iterable(soonest.values())), key=_importance)


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield each finding once, if several ranks have it: this run's own, or the lowest rank's."""
    alike: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        alike.setdefault(same_on_ranks(finding), []).append(finding)
    for group in alike.values():
        own = [finding for finding in group if finding.rank is None]
        others = sorted({finding.rank for finding in group if finding.rank is not None})
        if not own:
            own = [next(finding for finding in group if finding.rank == others[0])]
            others = others[1:]
        for finding in own:
            if others:
                also = f"The same was found in {ranks_text(others)}."
                yield replace(finding, evidence=(*finding.evidence, also))
            else:
                yield finding


def same_on_ranks(finding: Finding) -> tuple[str, str | None]:
    """Return a key that findings of several ranks have in common if they are about the same memory.

    Each rank has a device with another number.
    """
    where = finding.where
    return finding.kind, where if where is None else _DEVICE.sub(r"\1", where)


def _importance(finding: Finding) -> tuple[bool, bool, float, float, int]:
    ends = float("inf") if finding.forecast is None else float(finding.forecast[0])
    return (
        not finding.rate,
        finding.kind == "growth",  # the cause is unknown
        ends,
        -(finding.rate or 0.0),
        _CONFIDENCE[finding.confidence],
    )


def sentence(finding: Finding, *, ended: bool = False, steady_since: int | None = None) -> str:
    """Return one sentence on a finding, its growth and its forecast.

    ``ended``: the run has ended. ``steady_since``: step at which the growth had ended; ``None``: it goes on.
    """
    title = finding.title.rstrip(".")
    if not finding.rate:
        return f"{title}."
    since = "" if finding.since_step is None else f" since step {finding.since_step:,}"
    if finding.is_part:
        return f"{title}, as a part of the growth{since}."
    if steady_since is not None:
        return f"{_past(finding, steady_since)}, and was steady after that."
    grows = "" if title.endswith(_GROWS) else ". Memory grows"
    return f"{title}{grows} by {format_bytes(finding.rate)} a step{since}{_forecast(finding, ended=ended)}."


def sentence_on_full_cache(finding: Finding, steady_since: int) -> str:
    """Return one sentence on a finding whose growth had ended at step ``steady_since``, long ago."""
    return f"Earlier growth has ended, as when a cache is full: {_past(finding, steady_since)}."


def _past(finding: Finding, until: int) -> str:
    title = finding.title.rstrip(".")
    grew = f"{title[: -len(_GROWS)]} grew" if title.endswith(_GROWS) else f"{title}. Memory grew"
    begun = f"from step {finding.since_step:,} to" if finding.since_step is not None else "until"
    return f"{grew} by {format_bytes(finding.rate or 0.0)} a step {begun} {until:,}"


def _forecast(finding: Finding, *, ended: bool) -> str:
    if finding.forecast is None:
        return ""
    low, high = finding.forecast
    steps = f"step {low:,}" if low == high else f"step {low:,} to {high:,}"
    limit = "" if finding.limit is None else f" ({format_bytes(finding.limit)})"
    return f"{_WOULD_HAVE if ended else _WILL}{steps}{limit}"


def evidence_and_remedy(finding: Explained) -> list[str]:
    """Return the lines below a finding's sentence: its evidence, its confidence, and what to do."""
    lines = [*finding.evidence, f"confidence: {finding.confidence}"]
    if finding.remedy:
        lines.append(f"what to do: {finding.remedy}")
    return lines


def beyond(verdict: str, alerts: Iterable[_Titled]) -> list[_Titled]:
    """Return the alerts that do not repeat the verdict: those whose title is not in the verdict.

    An alert of a run that has ended can have a forecast that the verdict has in other words, or lacks.
    """
    return [alert for alert in alerts if alert.title.partition(_WILL)[0] not in verdict]


def failure_title(failure: OutOfMemory, last_step: int | None) -> str:
    """Return one line on a failed allocation: its device or worker, the last complete step, and its size.

    ``last_step`` is ``None`` if no step was complete.
    """
    after = after_step(last_step)
    if failure.worker is not None:
        place = f"in {failure.worker}"
    else:
        place = "on the host" if failure.device == "host" else f"on {failure.device}"
        if failure.thread is not None:
            place += f" in the thread {failure.thread}"
    wanted = "" if failure.requested is None else f", {format_bytes(failure.requested)} requested"
    return f"Out of memory {place} {after}{wanted}"


def failure_place(failure: OutOfMemory) -> str | None:
    """Return where a failed allocation was made: layer, pass and line, as far as known; ``None``: unknown."""
    phase = failure.phase and _PASSES.get(failure.phase, failure.phase)
    parts = (failure.worker, failure.layer and f"layer {failure.layer}", phase, failure.line)
    return ", ".join(filter(None, parts)) or None


def joined(title: str, text: str) -> str:
    """Return a title and a text in one line. A first sentence that the title has already is left out."""
    first, stop, rest = text.partition(". ")
    if stop and first in title:
        text = rest
    return f"{title}. {text[0].upper()}{text[1:]}" if text else f"{title}."


def after_step(last_step: int | None) -> str:
    """Return ``after step 12``, or ``before the end of the first step`` if no step was complete."""
    return "before the end of the first step" if last_step is None else f"after step {last_step:,}"


def of_rank(rank: int, title: str) -> str:
    """Return a title with the rank that it is about, such as ``Rank 1 ran out of memory after step 29``."""
    for beginning, predicate in _PREDICATES.items():
        if title.startswith(beginning):
            return f"Rank {rank} {predicate}{title.removeprefix(beginning)}"
    if title.startswith(_UNSURE):
        return f"Unsure: rank {rank}: {title.removeprefix(_UNSURE)}"
    return f"Rank {rank}: {title}"


def rank_ended(rank: int, how: str, step: int | None, reason: str | None) -> str:
    """Return a title such as ``Rank 3 was killed by SIGKILL after step 120``."""
    why = "" if reason is None else f" ({reason})"
    return f"Rank {rank} {how} {after_step(step)}{why}"


def how_it_ended(signal: str | None, code: int | None) -> str:
    """Return the predicate of a sentence about a process that ended without finishing its run."""
    if signal is not None:
        return f"was killed by {signal}"
    if code is not None:
        return f"exited with code {code} without finishing its run"
    return "ended without finishing its run"


def ended_together(ranks: Sequence[int], how: str, step: int | None) -> str:
    """Return a title about the end of several ranks, of which none is known as the cause."""
    plural = how.replace("was ", "were ", 1).replace("its run", "their runs")
    named = ranks_text(ranks)
    return f"{named[0].upper()}{named[1:]} {plural if len(ranks) > 1 else how} {after_step(step)}"


def no_rank_is_the_cause(*, is_from_outside: bool, missing: str | None) -> str:
    """Return a remark on the end of a training of which no rank is known as the cause."""
    if missing is not None:
        return f"{missing}, and may have failed before"
    if is_from_outside:
        return "no rank failed before: the job was cancelled, preempted or out of time"
    return "it is unknown which rank failed first"


def also_ended(
    others: Sequence[tuple[int, str | None]], out_of_memory: Sequence[int], missing: str | None
) -> str:
    """Return a remark on the ranks that ended after the one that failed first.

    ``others`` has the other ranks' numbers and the signals that ended them; ``out_of_memory`` has the numbers
    of those that ran out of memory, too. ``missing``: see `without_runs`.
    """
    parts = [f"{ranks_text(out_of_memory)} ran out of memory, too"] if out_of_memory else []
    if others:
        signals = {signal for _, signal in others}
        by = f" ({signal})" if len(signals) == 1 and (signal := signals.pop()) else ""
        ranks = [rank for rank, _ in others]
        cause = "it is not the cause" if len(ranks) == 1 else "they are not the cause"
        parts.append(
            f"{ranks_text(ranks)} ended afterwards{by}: {cause}; if a rank ends badly, the launcher ends the "
            "others, or they fail without it"
        )
    if not parts and missing is None:
        return "no other rank has ended badly"
    return "; ".join(parts if missing is None else [*parts, missing])


def without_runs(world_size: int | None, known: int | None) -> str | None:
    """Return a clause on the ranks that have no run in this folder; ``None`` if all have one."""
    if world_size is None or known is None or known >= world_size:
        return None
    missing = world_size - known
    return (
        f"{missing} of {world_size} ranks {'has' if missing == 1 else 'have'} no run in this folder"
    )


def ranks_text(numbers: Iterable[int]) -> str:
    """Return the numbers of ranks as text, such as ``ranks 0, 1 and 5``."""
    ranks = sorted(numbers)
    shown = [str(rank) for rank in ranks[:_RANKS_NAMED]]
    if len(ranks) > _RANKS_NAMED:
        return f"ranks {', '.join(shown)} and {len(ranks) - _RANKS_NAMED:,} more"
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
