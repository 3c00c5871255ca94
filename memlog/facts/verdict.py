"""Verdict on a run's memory: a finding, an all-clear with its evidence, or "unsure"."""

from __future__ import annotations

from msgspec.structs import replace

from memlog._internal.terminal import format_bytes
from memlog.events import ALLOCATED, HOST_ANON, Device, Finding
from memlog.facts.levels import HOST, UNKNOWN, doubt, memory_of, peak_kind, unsteady
from memlog.facts.oom_cause import title_with_cause
from memlog.facts.run_fold import RunFold, RunStatus, owner_of
from memlog.facts.run_verdict import RunVerdict
from memlog.findings import (
    after_step,
    failure_title,
    joined,
    of_rank,
    ranked,
    sentence,
    sentence_on_full_cache,
)
from memlog.growth.evidence import FEWEST_LEVELS, Evidence
from memlog.growth.series import Suspicion

_LOST = 0.1
"""If more steps than this part of the steady ones are lost at the end, growth can't be excluded."""


def verdict(facts: RunFold, status: RunStatus) -> RunVerdict:
    """Return the verdict on a run.

    An all-clear needs evidence from every series: the process's memory and each device's. If a series rises
    and nothing was found, the verdict is unsure.
    """
    failed = facts.rank_failure
    if failed is not None and failed.run is not None:
        outcome = failed.outcome or "unsure"
        return RunVerdict(outcome, joined(failed.title, failed.verdict), rises=outcome == "unsure")
    judged = of_memory(facts, status)
    failure = _bad_end(facts, status)
    return judged if failure is None else replace(judged, text=joined(failure, judged.text))


def of_memory(facts: RunFold, status: RunStatus) -> RunVerdict:
    """Return the verdict without a word on how the run ended."""
    findings = facts.findings(status)
    if findings:
        main, *others = findings
        parts = [other.title for other in others if other.is_part and other.memory == main.memory]
        return RunVerdict("finding", _told(facts, status, main), finding=main, parts=tuple(parts))
    judged = _without_finding(facts, status)
    for past in facts.past_findings(status)[:1]:
        since = facts.levels.steady_since(past) or 0
        judged = replace(judged, text=f"{judged.text} {sentence_on_full_cache(past, since)}")
    doubt = facts.rank_doubt
    if doubt is None or judged.rises:
        return judged
    return RunVerdict("unsure", of_rank(doubt.rank, doubt.text), rises=True)


def _without_finding(facts: RunFold, status: RunStatus) -> RunVerdict:
    name = _main(facts)
    reached = _reached(facts, name)
    if not facts.steps:
        return RunVerdict("too few steps", f"Without steps, growth is not judged: {reached}.")
    few = facts.levels.rise_of_few()
    if facts.steps < FEWEST_LEVELS or few is not None:
        return _of_few_steps(facts, few, reached)
    grown = [
        (growth.rise, owner_of(series), growth)
        for series, growth in facts.growth(status).items()
        if series == HOST_ANON or series.endswith(ALLOCATED)
    ]
    most, owner, growth = max(grown, key=lambda candidate: candidate[0], default=(0.0, HOST, None))
    unsure = unsteady(facts.levels)
    if growth is not None and (unsure is None or unsure[0] == owner or unsure[1].rise <= most):
        memory = memory_of(owner, facts.levels)
        text = _unsure(facts, owner, f"{memory} {_grew(growth)}", growth.rate, growth.since_step)
        return RunVerdict("unsure", text, rises=True)
    if unsure is not None:
        owner, known = unsure
        rises = known.rise > 0
        text = _unsure(facts, owner, doubt(owner, known, facts.levels), known.rise / known.steps)
        return RunVerdict("unsure", text, rises=rises)
    known_main = facts.levels.evidence(name)
    if known_main is None or known_main.since is None:
        return RunVerdict("unsure", f"Unsure: memory after the steps is unknown: {reached}.")
    return _of_steady_levels(facts, known_main, reached)


def _of_steady_levels(facts: RunFold, known: Evidence, reached: str) -> RunVerdict:
    """Return the all-clear, or ``unsure`` if processes pile up, a suspect is left, or steps are lost."""
    if facts.processes is not None:
        kind, count = facts.processes
        text = f"{count} child processes ({kind}) were started and have not ended"
        return RunVerdict("unsure", f"Unsure: {text}: {reached}.", rises=True)
    suspect = _not_excluded(facts, known)
    if suspect is not None:
        text = (
            f"memory is steady since step {known.since or 0:,}, but a rise of less than "
            f"{format_bytes(known.excluded)} in {known.steps:,} steps is not excluded"
        )
        cause = f" Possible cause: {suspect.title.rstrip('.')}."
        return RunVerdict("unsure", f"Unsure: {text}: {reached}.{cause}")
    last = (known.since or 0) + known.steps - 1
    lost = (facts.last_step or 0) - last
    if facts.has_lost_events and lost > _LOST * known.steps:
        text = f"the steps after step {last:,} are lost, and memory was steady until then"
        return RunVerdict(
            "unsure", f"Unsure: {text} ({known.steps:,} of {facts.steps:,} steps): {reached}."
        )
    return RunVerdict("steady", f"No growth: {reached}, {evidence_text(known)}.")


def _not_excluded(facts: RunFold, known: Evidence) -> Finding | None:
    """Return a suspect of a search on the host that has not ended, if its growth could go on unseen."""
    suspects = [
        suspect
        for series, inquiry in facts.inquiries.items()
        if owner_of(series) == HOST and not inquiry.will_fit
        for suspect in inquiry.suspects
    ]
    return next(
        (suspect for suspect in suspects if (suspect.rate or 0.0) * known.steps < known.excluded),
        None,
    )


def _of_few_steps(facts: RunFold, few: tuple[str, int, int] | None, reached: str) -> RunVerdict:
    """Return the verdict if there are too few levels. They still tell whether memory rose."""
    owner, count, rise = few or (HOST, facts.steps, 0)
    recorded = "steps" if count >= facts.steps else "recorded steps"
    of = str(count) if count >= facts.steps else f"{count} of {facts.steps:,}"
    rose = ""
    if rise:
        rose = f"{memory_of(owner, facts.levels)} rose by {format_bytes(rise)}, "
        reached = _reached(facts, owner)
    text = f"Too few {recorded} to judge growth ({of}): {rose}{reached}."
    return RunVerdict("too few steps", text, rises=rise > 0)


def _main(facts: RunFold) -> str:
    """Return the memory whose peak is told: ``host`` or a device.

    It is that of the failed allocation, else the device with the highest peak.
    """
    failed = None if facts.failure is None else facts.failure.device
    if failed is not None and _peak(facts, failed) is not None:
        return failed
    # A device without levels was not used in steps.
    names = facts.levels.devices or [name for name in facts.devices if _peak(facts, name)]
    return max(names, key=lambda name: _peak(facts, name) or 0, default=HOST)


def _peak(facts: RunFold, name: str) -> int | None:
    return facts.peaks.of(peak_kind(name), UNKNOWN).bytes


def _told(facts: RunFold, status: RunStatus, finding: Finding) -> str:
    """Return a finding's sentence. It has no forecast if memory has run out, or did not when it should."""
    has_run_out = facts.failure is not None and status != "running"
    if has_run_out or (finding.forecast and (facts.last_step or 0) > finding.forecast[1]):
        finding = replace(finding, forecast=None)
    return sentence(
        finding, ended=status != "running", steady_since=facts.levels.steady_since(finding)
    )


def evidence_text(known: Evidence) -> str:
    """Return the evidence of an all-clear: since when, over how many steps, and what rise it excludes."""
    noise = f" within {format_bytes(known.noise)}" if known.noise >= 1 else ""
    return (
        f"steady since step {known.since or 0:,} ({known.steps:,} steps{noise}: a rise of more than "
        f"{format_bytes(known.excluded)} is excluded)"
    )


def _grew(growth: Suspicion) -> str:
    steps = growth.step - growth.since_step
    return (
        f"grew by {format_bytes(growth.rate)} a step since step {growth.since_step:,}, by "
        f"{format_bytes(growth.rate * steps)} in all"
    )


def _unsure(facts: RunFold, owner: str, text: str, rate: float, since: int | None = None) -> str:
    """Return a verdict on memory that rose, or may rise, and on the search for the cause of a rise.

    ``rate`` is the rise in bytes a step since step ``since`` (``None``: the first one); 0 if it is not above
    the noise.
    """
    searches = [inquiry for series, inquiry in facts.inquiries.items() if owner_of(series) == owner]
    suspects = ranked(suspect for inquiry in searches for suspect in inquiry.suspects)
    rises, cause = rate > 0, ""
    if rises and suspects:
        cause = f" Possible cause: {suspects[0].title.rstrip('.')}."
    elif owner == HOST and facts.fills_a_buffer(rate, since):
        text += (
            ", most of it in memory that the process had allocated before and never used, as when a buffer "
            "fills"
        )
    elif owner == HOST and rises and facts.have_inputs_grown(since):
        text += ", and the steps with the largest inputs came late"
    elif rises and any(inquiry.searching for inquiry in searches):
        text += ", and the search for the cause had not ended"
    elif rises:
        text += ", and a search found no cause" if searches else ", and the cause was not searched"
    return f"Unsure: {text}: {_reached(facts, owner)}.{cause}"


def _reached(facts: RunFold, name: str) -> str:
    limit = facts.host_limit
    if name != HOST:
        device: Device | None = facts.devices.get(name)
        limit = None if device is None else device.capacity
        if limit is None and facts.failure is not None and facts.failure.device == name:
            limit = facts.failure.capacity
    peak = _peak(facts, name)
    of = "" if limit is None else f" of {format_bytes(limit)}"
    on = f" on {name}" if name != HOST and len(facts.devices) > 1 else ""
    return "the peak is unknown" if peak is None else f"peak {format_bytes(peak)}{of}{on}"


def _bad_end(facts: RunFold, status: RunStatus) -> str | None:
    if facts.rank_failure is not None:
        return facts.rank_failure.title
    if facts.failure is not None and status != "finished":
        return facts.failure_title or title_with_cause(facts.failure, facts.last_step)
    if facts.failure is not None:
        return f"{failure_title(facts.failure, facts.last_step)}, which the program caught"
    if status != "killed":
        return None
    if facts.failure_title is not None:
        return facts.failure_title
    # A run with an end event was ended by Ctrl-C, or by the cancellation of its task.
    how = "Ended unexpectedly" if facts.end is None else "Interrupted"
    return f"{how} {after_step(facts.last_step)}"
