"""Write the post-mortem report: failed request, free memory, memory by category and layer, advice.

The report depends on three things only: the journal, the worst traced step, and the observations of the
writing process (`Witness`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import format_bytes
from memlog.events import (
    OF_OTHERS,
    OTHER_PROCESSES,
    Batch,
    OutOfMemory,
    Reading,
    Trace,
    main_reading,
    main_readings,
)
from memlog.facts.oom_cause import title_with_cause
from memlog.facts.oom_room import named, unused
from memlog.findings import after_step, evidence_and_remedy, how_it_ended, of_rank
from memlog.ranks.ends import FROM_OUTSIDE
from memlog.reports.advice import (
    Prediction,
    advice,
    had_room,
    in_a_step,
    needed,
    needed_far_more,
    pinned_share,
)
from memlog.reports.final_state import FinalState, of_the_end
from memlog.reports.growth_causes import GrowthCauses
from memlog.reports.oom_diagnosis import (
    OutOfMemoryLikelihood,
    Witness,
    background,
    cause,
    suspect,
)
from memlog.reports.schema import Summary
from memlog.reports.worst_step import held_more

_UNEXPECTED = "Ended unexpectedly"


def title_of_rank(state: FinalState, title: str) -> str:
    """Return a title that names this rank, and how its process ended if that is known.

    If no rank is the cause of the training's end, the title is about all ranks.
    """
    position, end = state.position, state.exit
    if position is None:
        return title
    if state.failed_with is not None and state.failed_with.first is None:
        return state.failed_with.title
    named = of_rank(position.rank, title)
    if title.startswith(_UNEXPECTED) and end is not None and (end.signal or end.code is not None):
        how = how_it_ended(end.signal, end.code)
        return f"Rank {position.rank} {how}{title.removeprefix(_UNEXPECTED)}"
    return named


def sentences_of_rank(state: FinalState) -> Iterator[str]:
    """Yield sentences on the end of this process and of the other ranks."""
    position, end, failure = state.position, state.exit, state.failed_with
    if position is None:
        return
    if end is not None and (end.signal or end.code is not None):
        yield f"The process {how_it_ended(end.signal, end.code)}."
    if failure is not None:
        yield f"{position.world_size} ranks trained together: {failure.text}."
    elif position.rank and end is not None and end.signal in FROM_OUTSIDE:
        yield (
            f"A launcher sends {end.signal} to all other ranks when one has ended. The run of rank 0 names "
            "the rank that failed first."
        )


_SIZES = 12
"""Maximum number of batch sizes to list."""


def batch_sizes(failures: Sequence[OutOfMemory]) -> list[int]:
    """Return the batch sizes with which allocations failed. Unknown ones are left out.

    `OutOfMemory.batch` comes first. Otherwise the size is the first dimension of those of its inputs in which
    failures differ, or, if none differs, the first dimension that all of its inputs have.
    """
    firsts = [
        {tensor.name: tensor.shape[0] for tensor in failure.inputs if tensor.shape}
        for failure in failures
    ]
    values = defaultdict[str, set[int]](set)
    for first in firsts:
        for name, size in first.items():
            values[name].add(size)
    sizes = []
    for failure, first in zip(failures, firsts, strict=True):
        varied = [name for name in first if len(values[name]) > 1]
        known = {first[name] for name in varied or first}
        if failure.batch is not None:
            sizes.append(failure.batch)
        elif len(known) == 1:
            sizes += known
    return sizes


def survived(summary: Summary) -> str:
    """Return how many allocations failed after which training went on; empty if there was none."""
    number, sizes = summary.survived_failures, summary.survived_batch_sizes
    first, last = summary.survived_first_step, summary.survived_last_step
    if not number:
        return ""
    failed = (
        "1 allocation failed and was" if number == 1 else f"{number:,} allocations failed and were"
    )
    where = f"at step {first:,}" if first == last else f"at steps {first:,} to {last:,}"
    tried = ", ".join(f"{size:,}" for size in sizes[:_SIZES])
    more = ", …" if len(sizes) > _SIZES else ""
    sized = "batch size" if len(sizes) == 1 else "batch sizes"
    # If a size was tried twice, or is unknown, the list does not tell the size of each failure.
    those = ", with the" if len(sizes) == number else "; known"
    of = f"{those} {sized} {tried}{more}" if sizes else ""
    return f"{failed} survived {where}{of}"


_GREW = 0.05
"""Growth of other processes' memory is told from this share of the device on."""
_LEAST_OUTSIDE = 1024**3
"""The same in bytes, if the driver does not tell whose memory it is."""
_NAMED = 4
"""Maximum number of other processes that the report names."""


def room(failure: OutOfMemory) -> Iterator[str]:
    """Yield a table of the figures, and sentences on the limit and on who holds the memory."""
    sizes = {
        "requested": failure.requested,
        "free": failure.free,
        "in use": failure.allocated,
        "limit": failure.limit,
    }
    if failure.reserved is not None:
        sizes["held by the allocator"] = failure.reserved
    yield table(tuple(sizes), [tuple(format_bytes(size) for size in sizes.values())])
    if failure.limited_by:
        yield _verdict(failure)
    yield from _device(failure)
    if failure.free_after is not None:
        # A limit on the address space counts every reserved address, used or not.
        of = "address space" if "address space" in (failure.limited_by or "") else "memory"
        yield (
            f"`free` and `in use` are those at the peak of the process's {of}. After the failed step's own "
            f"memory was freed, {format_bytes(failure.free_after)} were free."
        )


def _verdict(failure: OutOfMemory) -> str:
    if failure.requested is None:
        return f"The requested size is unknown. The tightest limit: {failure.limited_by}."
    if not had_room(failure):
        return f"Limit: {failure.limited_by}."
    if failure.device != "host":
        return (
            f"Limit: {failure.limited_by}. As memlog read it, there was room for the request. Possibly "
            "another process freed memory in between, or the driver had no piece of this size."
        )
    return (
        "The tightest limit that memlog knows had room for the request, so another limit must have stopped "
        f"it. The tightest known limit: {failure.limited_by}."
    )


def _device(failure: OutOfMemory) -> Iterator[str]:
    """Yield a sentence on who holds the device's memory."""
    state, idle = failure.state, unused(failure)
    if state is None:
        return
    parts = []
    if state.outside:
        parts.append(
            f"{format_bytes(state.outside)} are in use outside PyTorch's allocator of this process"
        )
    if state.others:
        largest = state.processes[:_NAMED]
        names = ", ".join(f"{named(process)} {format_bytes(process.used)}" for process in largest)
        parts.append(f"other processes hold {format_bytes(state.others)} ({names})")
    if idle:
        parts.append(f"the allocator holds {format_bytes(idle)} that no tensor uses")
    if state.in_pools:
        parts.append(f"{format_bytes(state.in_pools)} belong to private pools of the allocator")
    if failure.limit is not None and failure.limit < (failure.capacity or 0):
        parts.append(
            f"the device has {format_bytes(failure.capacity)}, of which {format_bytes(state.free)} are free"
        )
    name = failure.device
    if state.shares_host:
        yield f"{name} shares the host's memory: `free` is what the machine could still give."
    if parts:
        yield f"On {name}, {'; '.join(parts)}."


def taken_by_others(state: FinalState) -> Iterator[str]:
    """Yield a sentence if other processes took much of the failed device during the run.

    If the driver does not tell whose memory it is, the sentence is about all memory outside the allocator. A
    process's own context and libraries are a part of that.
    """
    failure = state.failure
    if failure is None or failure.state is None or not failure.capacity:
        return
    device, kind, whose = failure.state, OF_OTHERS, "outside PyTorch's allocator of this process"
    now, threshold = device.outside, max(_GREW * failure.capacity, _LEAST_OUTSIDE)
    if device.others is not None:
        kind, whose, threshold = OTHER_PROCESSES, "of other processes", _GREW * failure.capacity
        # Child processes belong to the run, so their memory is not that of others.
        now = device.others - sum(
            process.used or 0 for process in device.processes if process.is_child
        )
    step, least = state.least.get(failure.device + kind, (None, None))
    if now is None or least is None or now - least < threshold:
        return
    own = main_reading(state.first, failure.device) if state.first is not None else None
    held = None if own is None or own.device is None else own.device.reserved
    at = "" if step is None else f" at step {step:,}"
    yield (
        f"During the run, the memory {whose} on {failure.device} grew from {format_bytes(least)}{at} to "
        f"{format_bytes(now)}. PyTorch's allocator of this process held {format_bytes(held)} after the first "
        f"step and {format_bytes(failure.reserved)} at the failure."
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table. The caller must separate it by blank lines from the text around it."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    # A vertical bar would end the cell.
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


_ADVICE = "What would help"
"""Heading of the list of advice."""
_SNAPSHOT = "out-of-memory."
"""First part of the names of the files about the allocator's snapshot."""
_SHOWN_STEPS = 10
_SHOWN_LAYERS = 10
_SHOWN_SHARE = 0.005
_PINNED_SHOWN = 0.01
"""Pinned memory is shown from this share of the host's memory that the run held at its highest."""
_GROWTH_MATTERS = 16 * 1024**2
_PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
}


class Report(msgspec.Struct, frozen=True):
    title: str
    """Title in one line, also for an alert."""
    text: str
    """Whole report, in Markdown."""


def report(
    state: FinalState,
    witness: Witness,
    predicted: Prediction | None = None,
    diagnostics: Diagnostics | None = None,
) -> Report:
    """Write a report on a run that ended badly.

    If writing a part of the report fails, ``diagnostics`` counts the error, and the other parts are written.
    """
    diagnostics = diagnostics or Diagnostics()
    suspicion, growth = suspect(state, witness), GrowthCauses(state)
    parts: list[tuple[str, Callable[[], Iterable[str]]]] = [
        ("", lambda: _cause(state, witness, suspicion, growth))
    ]
    telling = suspicion.of_memory and not (state.failure and state.failure.worker)
    if telling:
        parts.append(("What held the memory", lambda: _holders(state)))
    inputs = state.largest or state.longest or (state.failure and state.failure.inputs)
    if suspicion.of_memory and inputs:
        parts.append(("Inputs", lambda: of_the_end(state)))
    parts.append(("The last steps", lambda: _last_steps(state)))
    trace = state.trace
    if trace is not None and not telling:
        parts.append(("The newest traced step", lambda: _newest_trace(trace, state)))
    if suspicion.of_memory:
        parts.append(
            (
                _ADVICE,
                lambda: [_list(advice(state, growth, predicted, cause(state, growth)))],
            )
        )
    else:
        parts.append(("Where else to look", lambda: [_list(_other_evidence())]))
    title = title_of_rank(state, _title(state, suspicion, growth))
    blocks = [f"# {title}"]
    if state.verdict is not None:
        blocks.append(f"**{state.verdict.text}**")
        if state.verdict.finding is not None:
            blocks.append(_list(evidence_and_remedy(state.verdict.finding)))
    for heading, write in parts:
        blocks += _part(heading, write, diagnostics)
    return Report(title, "\n\n".join(blocks) + "\n")


def _part(heading: str, write: Callable[[], Iterable[str]], diagnostics: Diagnostics) -> list[str]:
    """Return a part of the report. If writing the part fails, return a sentence that says so."""
    written = ["memlog failed to write this part; its log has the error."]
    with diagnostics.contained(f"writing the report's part {heading or 'on the cause'!r}"):
        written = list(write())
    return [f"## {heading}", *written] if heading else written


def _title(state: FinalState, suspicion: OutOfMemoryLikelihood, growth: GrowthCauses) -> str:
    failure, after = state.failure, after_step(state.last_step)
    if failure is not None and failure.signal is not None:
        likely = " because memory ran out" if suspicion.level == "likely" else ""
        return f"{failure.worker} was killed{likely} {after}"
    if failure is not None:
        return title_with_cause(failure, state.last_step, background(state, growth))
    if suspicion.level == "likely":
        return f"Killed by the kernel because memory ran out {after}"
    scarce = ", with little memory left" if suspicion.level == "possible" else ""
    return f"Ended unexpectedly {after}{scarce}"


def _cause(
    state: FinalState, witness: Witness, suspicion: OutOfMemoryLikelihood, growth: GrowthCauses
) -> Iterator[str]:
    yield from sentences_of_rank(state)
    if state.failure is None:
        yield _unexpected_end(witness)
        yield suspicion.why
    else:
        yield from _failure(state.failure, failed_by_chance=growth.failed_by_chance)
        yield from taken_by_others(state)
        if suspicion.why:
            yield suspicion.why
    if state.survived:
        times = "Once" if state.survived == 1 else f"{state.survived} times"
        yield f"{times} before, memory had run out and training had continued."


def _failure(failure: OutOfMemory, *, failed_by_chance: bool) -> Iterator[str]:
    yield f"Error message: `{failure.message.replace('`', chr(39))}`"
    if failure.raised_as:
        yield f"It led to the error that ended the program: `{failure.raised_as.replace('`', chr(39))}`"
    if failure.worker:
        yield (
            f"It happened in {failure.worker}, a separate process: its free memory and its limit are unknown."
        )
        return
    if failure.line is not None and not (failure.layer or failure.phase):
        yield f"{failure.line} made the request, outside the model's layers and the optimizer."
    if failure.layer or failure.phase:
        phase = _PHASES.get(failure.phase or "", "an unknown phase")
        if failed_by_chance:
            yield (
                f"The request that failed was made in {phase}, layer: {failure.layer or 'unknown'}. The "
                "phase in which the earlier memory was allocated is unknown."
            )
        else:
            by = "" if failure.line is None else f" The program was at {failure.line}."
            yield f"It happened in {phase}, layer: {failure.layer or 'unknown'}.{by}"
    yield from room(failure)


def _unexpected_end(witness: Witness) -> str:
    by = "memlog's helper process" if witness.writer == "helper" else "`memlog sync`"
    return (
        "The process ended unexpectedly: memlog saw no error, and Python's exit handlers did not run. "
        "SIGKILL, SIGTERM without a handler, a crash (such as a segmentation fault) and `os._exit()` end a "
        f"process in this way. This report is by {by}, which can't tell them apart."
    )


def _other_evidence() -> Iterator[str]:
    yield (
        "The exit status in the shell or the scheduler: 137 is SIGKILL, 143 SIGTERM, 139 a "
        "segmentation fault, 134 an abort (C++ code that gets no memory ends with it, and prints "
        "`std::bad_alloc`); any other is the program's own, such as the argument of `os._exit()`."
    )
    yield "The scheduler's log: a time limit, preemption or an eviction ends a job in this way."
    yield "`python -X faulthandler` prints where Python was when a crash ends it."


def _holders(state: FinalState) -> Iterator[str]:
    trace = state.trace
    if state.traced_device is not None and state.failure is not None:
        yield (
            f"No traced step shows the memory of {state.failure.device}: the traced steps are of "
            f"{state.traced_device}, because memlog traces one device."
        )
    elif trace is None and not state.steps:
        yield "No step was complete, so the layers' shares are unknown."
    elif trace is None and state.untraced:
        yield f"No step was traced, so the layers' shares are unknown: {state.untraced}."
    elif trace is None:
        yield (
            "No step was traced, so the layers' shares are unknown: "
            "`memlog.init(model=model, layers=True)` traces some, with `budget=0.5` the first step "
            "of a large model, too."
        )
    else:
        yield f"From the newest traced step, {_traced(trace)}. {_likeness(trace, state)}"
        yield from _shares(trace)
    yield from _files(state)


def _newest_trace(trace: Trace, state: FinalState) -> Iterator[str]:
    yield f"It was {_traced(trace)}. It shows what training needs, not what ended this run."
    yield from _files(state)


def _traced(trace: Trace) -> str:
    which = "a step that did not end" if trace.step is None else f"step {trace.step}"
    return f"{which} ({trace.engine}), at its peak of {format_bytes(trace.peak)} in tensors"


def _likeness(trace: Trace, state: FinalState) -> str:
    """Return a sentence on how similar the traced step is to the one that failed."""
    failure, last = state.failure, state.last_step
    if trace.step is None:
        return "It was running when the run ended."
    later = ""
    if last is not None:
        after = last + 1 - trace.step
        later = f" came {after} {'step' if after == 1 else 'steps'} later. It"
    if failure is None:
        return f"The last step{later} was not traced, and may have been different."
    if not in_a_step(failure, trace):
        return "The failed request was made outside the model's layers, but the tables are about the layers."
    if needed_far_more(failure, trace):
        how = "requested" if failure.device == "host" else "in use or requested"
        return (
            f"The step that failed{later} was not traced, and needed far more: "
            f"{format_bytes(needed(failure))} were {how} there. The tables, which are of the traced step, "
            "may not show what held that memory."
        )
    more = held_more(state, trace)
    if more is not None:
        return f"The step that failed{later} was not traced, and {format_bytes(more)} more were in use there."
    return f"The step that failed{later} was not traced, and may have been different."


def _shares(trace: Trace) -> Iterator[str]:
    total = trace.peak or 0
    held = sorted(trace.at_peak.items(), key=lambda item: -item[1])
    layers = ((layer.path, layer.at_peak or 0) for layer in trace.layers[:_SHOWN_LAYERS])
    lines = ((f"`{line.line}`", line.at_peak) for line in trace.lines)
    yield table(("what", "bytes", "share"), _parts(held, total))
    for heading, sizes in (("layer", layers), ("line outside all modules", lines)):
        rows = _parts(sizes, total)
        if rows:
            yield table((heading, "held at the peak", "share"), rows)


def _parts(sizes: Iterable[tuple[str, int]], total: int) -> list[tuple[str, str, str]]:
    """Return a row for each part of the memory: name, size, share. A part of 0 % (rounded) has no row."""
    return [
        (name, format_bytes(size), f"{size / total:.0%}" if total else "unknown")
        for name, size in sizes
        if size > total * _SHOWN_SHARE
    ]


def _files(state: FinalState) -> Iterator[str]:
    snapshots = [name for name in state.files if name.startswith(_SNAPSHOT)]
    # The flame graphs are of the traced device, the snapshot is of the failed one.
    files = snapshots if state.traced_device is not None else state.files
    if files:
        shown = (snapshots or files)[-1]
        names = " and ".join(f"`{name}`" for name in files)
        command = f"`{state.open_command}` shows"
        if state.traced_device is not None:
            command = "`memlog open` with the file's path shows"
        yield (
            f"More is in {names}, beside this report in the run's folder: {command} a flame graph. "
            "On another machine, `memlog pull ID --backend mlflow -o out` downloads the run's "
            "files from the tracker (ID is the run's id there; for W&B `--backend wandb`), and "
            f"`memlog open out/{shown}` shows it."
        )


def _last_steps(state: FinalState) -> Iterator[str]:
    yield _trend(state)
    sample = state.last_sample
    if sample is not None:
        at = "" if sample.step is None else f" (at step {sample.step})"
        yield (
            f"In the helper process's last sample{at}, the process and its descendants held "
            f"{format_bytes(sample.tree_pss)}; the machine had {format_bytes(sample.available)} available."
        )
    pinned = state.pinned
    if pinned is not None and pinned_share(state) >= _PINNED_SHOWN:
        yield (
            f"Of the host's memory, PyTorch held {format_bytes(pinned.held)} as page-locked (pinned) memory "
            f"({format_bytes(pinned.in_use)} in use)."
        )
    steps = state.steps[-_SHOWN_STEPS:]
    if steps:
        rows = [main_readings(step) for step in steps]
        peaks = any(host.source == "exact" for host, *_ in rows)
        process = "process (RSS), peak" if peaks else "process (RSS)"
        devices = (f"{reading.owner} in use, peak" for reading in rows[-1][1:])
        yield table(
            ("step", process, *devices),
            [(str(step.step), *_row(row, peaks)) for step, row in zip(steps, rows, strict=True)],
        )


def _trend(state: FinalState) -> str:
    if len(state.steps) < 2 or state.first is None:  # noqa: PLR2004 - a trend needs two ends
        return "There were too few steps to see a trend."
    count = state.steps[-1].step - state.steps[0].step
    ends = (state.first, state.steps[0], state.steps[-1])
    begun, before, after = (_levels(step) for step in ends)
    return " ".join(
        _growth(name, count, before.get(name), size, begun.get(name))
        for name, size in after.items()
    )


def _levels(step: Batch) -> dict[str, int | None]:
    return {
        "the process's memory" if reading.device is None else reading.owner: reading.level
        for reading in main_readings(step)
    }


def _growth(name: str, count: int, before: int | None, after: int | None, begun: int | None) -> str:
    if before is None or after is None:
        return f"The change of {name} is unknown."
    grown = after - before
    if abs(grown) < max(_GROWTH_MATTERS, before // 100):
        how = f"stayed at {format_bytes(after)}"
    else:
        verb = "grew" if grown > 0 else "fell"
        pace = format_bytes(abs(grown) / max(count, 1))
        how = f"{verb} from {format_bytes(before)} to {format_bytes(after)}, {pace} a step"
    since = "" if begun is None else f" (after the first step it was {format_bytes(begun)})"
    span = "the last step" if count == 1 else f"the last {count} steps"
    return f"In {span} {name} {how}{since}."


def _row(readings: Sequence[Reading], peaks: bool) -> Iterator[str]:
    host, *devices = readings
    yield f"{format_bytes(host.level)}, {_peak(host)}" if peaks else format_bytes(host.level)
    for device in devices:
        yield f"{format_bytes(device.level)}, {format_bytes(device.peak)}"


def _peak(host: Reading) -> str:
    """Format the process's peak in a step, with "at most" if only an upper bound is known."""
    bound = {"exact": "", "watermark": "at most "}.get(host.source or "")
    return "unknown" if bound is None else f"{bound}{format_bytes(host.peak)}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def first_advice(text: str) -> str | None:
    """Return the first line of advice in a report; ``None`` if it has none."""
    advised = text.partition(f"\n## {_ADVICE}\n\n- ")[2]
    return advised.partition("\n")[0] or None
