"""A run's end in plain words: what was asked for, what was free, who held what, what would help.

A pure function of the journal, of the worst traced step, and of what the writer saw from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from memlog.analysis.advice import advice
from memlog.analysis.last_moments import LastMoments
from memlog.analysis.predict import Advice
from memlog.events import Batch, OutOfMemory, Trace
from memlog.units import format_bytes

Writer: TypeAlias = Literal["helper", "sync"]

_SHOWN_STEPS = 10
_SHOWN_LAYERS = 10
_GROWTH_MATTERS = 16 * 1024**2


class Witness(msgspec.Struct, frozen=True):
    """What was seen from outside of a trainer that ended without a word."""

    writer: Writer
    oom_kills: int | None = None
    """How many processes the kernel killed for memory in the trainer's control group meanwhile."""


class Report(msgspec.Struct, frozen=True):
    """A run's end, explained."""

    title: str
    """One line, for an alert."""
    text: str
    """Markdown."""


def report(moments: LastMoments, witness: Witness, predicted: Advice | None = None) -> Report:
    """Explains how a run ended that ended badly.

    Args:
        moments: What its journal says.
        witness: What was seen from outside.
        predicted: What would make its worst traced step smaller.
    """
    title = _title(moments, witness)
    sections = [
        f"# {title}",
        *_cause(moments, witness),
        "## Who held what",
        *_holders(moments.trace),
        *_files(moments),
        "## How it came",
        *_course(moments),
        "## What would help",
        *(f"- {line}" for line in advice(moments, predicted)),
    ]
    return Report(title, "\n\n".join(_joined(sections)) + "\n")


def _joined(sections: list[str]) -> Iterator[str]:
    """Rows of a table, and of a list, stand together; everything else is a paragraph."""
    block: list[str] = []
    for line in sections:
        if block and not (line[:1] in "|-" and line[:1] == block[0][:1]):
            yield "\n".join(block)
            block = []
        block.append(line)
    if block:
        yield "\n".join(block)


def _title(moments: LastMoments, witness: Witness) -> str:
    failure, step = moments.failure, moments.last_step
    after = "before the first step" if step is None else f"after step {step}"
    if failure is not None:
        wanted = (
            "" if failure.requested is None else f", {format_bytes(failure.requested)} asked for"
        )
        return f"Out of memory on {_place(failure)} {after}{wanted}"
    if witness.oom_kills:
        return f"Killed by the kernel for memory {after}"
    return f"Killed {after}"


def _place(failure: OutOfMemory) -> str:
    return "the host" if failure.device == "host" else failure.device


def _cause(moments: LastMoments, witness: Witness) -> Iterator[str]:
    failure = moments.failure
    if failure is None:
        yield _killed(witness)
    else:
        yield f"The allocator said: `{failure.message}`"
        if failure.layer or failure.phase:
            yield f"It happened in {_phase(failure)}, layer: {failure.layer or 'unknown'}."
        yield from _table(
            ("asked for", "free", "limit", "in use", "held by the allocator"),
            [
                tuple(
                    format_bytes(size)
                    for size in (
                        failure.requested,
                        failure.free,
                        failure.limit,
                        failure.allocated,
                        failure.reserved,
                    )
                )
            ],
        )
        if failure.limited_by:
            yield f"What limits it: {failure.limited_by}."
    if moments.survived:
        yield f"{moments.survived} failed allocations before were survived."


def _killed(witness: Witness) -> str:
    by = "memlog's helper process" if witness.writer == "helper" else "`memlog sync`"
    told = (
        "The process ended without a word: it was killed (SIGKILL, SIGTERM without a handler, or a crash). "
        f"This report was written from outside, by {by}."
    )
    if witness.oom_kills:
        return (
            f"{told} Meanwhile the kernel killed {witness.oom_kills} process(es) of its control group for "
            "want of memory, so that is the likely cause."
        )
    if witness.oom_kills == 0:
        return f"{told} The kernel killed no process of its control group for want of memory meanwhile."
    return f"{told} Whether the kernel killed it for want of memory is unknown (`dmesg` would say)."


def _phase(failure: OutOfMemory) -> str:
    known = {
        "forward": "the forward pass",
        "backward": "the backward pass",
        "optimizer": "the optimizer",
    }
    return known.get(failure.phase or "", "no known phase")


def _holders(trace: Trace | None) -> Iterator[str]:
    if trace is None:
        yield (
            "No step was traced, so the layers' shares are unknown: "
            "`memlog.init(model=model, layers=True)` traces one now and then."
        )
        return
    at = "" if trace.step is None else f" at step {trace.step}"
    yield f"From the newest traced step{at} ({trace.engine}), whose peak was {format_bytes(trace.peak)}:"
    total = trace.peak or 0
    yield from _table(
        ("what", "bytes", "share"),
        [
            (name, format_bytes(size), _share(size, total))
            for name, size in sorted(trace.at_peak.items(), key=lambda item: -item[1])
            if size
        ],
    )
    if trace.layers:
        yield from _table(
            ("layer", "held at the peak", "share"),
            [
                (
                    layer.path or "(the model itself)",
                    format_bytes(layer.at_peak),
                    _share(layer.at_peak, total),
                )
                for layer in trace.layers[:_SHOWN_LAYERS]
            ],
        )


def _files(moments: LastMoments) -> Iterator[str]:
    if moments.files:
        names = " and ".join(f"`{name}`" for name in moments.files)
        yield (
            f"More is in {names}: `memlog pull {moments.run_id} -o out` brings the run's files, "
            f"`memlog open out/{moments.files[-1]}` shows it as a flame graph."
        )


def _course(moments: LastMoments) -> Iterator[str]:
    yield _trend(moments)
    sample = moments.samples[-1] if moments.samples else None
    if sample is not None:
        yield (
            f"When last looked at from outside, the process and those that it had started held "
            f"{format_bytes(sample.tree_pss)}; the machine had {format_bytes(sample.available)} left."
        )
    steps = moments.steps[-_SHOWN_STEPS:]
    if steps:
        yield from _table(
            ("step", "host", *(f"{device.name} in use, peak" for device in steps[-1].devices)),
            [_row(step) for step in steps],
        )


def _trend(moments: LastMoments) -> str:
    if len(moments.steps) < 2 or moments.first is None:  # noqa: PLR2004 - a trend needs two ends
        return "Too few steps were made to tell a trend."
    count = moments.steps[-1].step - moments.steps[0].step
    begun, before, after = (
        _levels(step) for step in (moments.first, moments.steps[0], moments.steps[-1])
    )
    return " ".join(
        _growth(name, count, before.get(name), size, begun.get(name))
        for name, size in after.items()
    )


def _levels(step: Batch) -> dict[str, int | None]:
    """What was in use after a step, by where."""
    return {
        "the host's memory": step.rss,
        **{device.name: device.allocated for device in step.devices},
    }


def _growth(name: str, count: int, before: int | None, after: int | None, begun: int | None) -> str:
    if before is None or after is None:
        return f"How {name} changed is unknown."
    grown = after - before
    if abs(grown) < max(_GROWTH_MATTERS, before // 100):
        how = f"stayed at {format_bytes(after)}"
    else:
        verb = "grew" if grown > 0 else "fell"
        pace = format_bytes(abs(grown) / max(count, 1))
        how = f"{verb} from {format_bytes(before)} to {format_bytes(after)}, {pace} a step"
    since = "" if begun is None else f" (after the first step it was {format_bytes(begun)})"
    return f"In the last {count} steps {name} {how}{since}."


def _row(step: Batch) -> tuple[str, ...]:
    devices = (
        f"{format_bytes(device.allocated)}, {format_bytes(device.peak)}" for device in step.devices
    )
    return (str(step.step), format_bytes(step.rss), *devices)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _share(part: int, total: int) -> str:
    return f"{part / total:.0%}" if total else "unknown"
