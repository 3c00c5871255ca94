"""Cause of a failed allocation on a device, from the figures at the failure, and the first line about it.

A cause is named only if the figures show it. Otherwise the text says what was in use, and names no cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from memlog._internal.terminal import format_bytes
from memlog.events import Alert, Batch, End, Event, Finding, OutOfMemory
from memlog.facts import oom_room as remedies
from memlog.facts.oom_room import Cause, advice_on_pieces, mention_of_pieces, missing, sufficient
from memlog.findings import after_step, failure_title

_LEAST_GROWN = 0.25
"""Growth counts as the cause from this share of the memory in use on."""
_MOST = 0.5
_LEAST_HELD = 0.1
"""Tensors in a container are mentioned from this share of the memory in use on."""
_SPARE = 0.5
"""Another device has room if this process holds less than this share of it."""
_DRIVER = ("error: out of memory", "STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED", "'out of memory'")
_PHASES = {"forward": "forward pass", "backward": "backward pass"}


class DeviceLevel(NamedTuple):
    """Bytes that this process's allocator holds on a device, and the device's size."""

    name: str
    reserved: int
    capacity: int


class Background(NamedTuple):
    """Memory of the failed device before the failure; the defaults mean unknown."""

    level: int | None = None
    """Bytes in use after the last complete step."""
    grown: int | None = None
    """Growth, in bytes, if memory grew throughout and the program probably keeps it."""
    steps: int = 0
    """Number of steps of the growth."""
    finding: Finding | None = None
    """Finding about memory that the program keeps."""
    others: Sequence[DeviceLevel] = ()
    """The other devices that the process uses."""


NOTHING_BEFORE = Background()


def cause_of(failure: OutOfMemory, before: Background = NOTHING_BEFORE) -> Cause | None:
    """Return the cause of a failed allocation; ``None`` in a worker, and if it is unknown.

    On the host, only a request for more than the whole memory is known as a cause.
    """
    if failure.worker is not None:
        return None
    if failure.activity == "pinned memory":
        return _pinned(failure)
    if failure.device == "host":
        return _request(failure)
    # First the causes that explain the failure alone. The others tell only what was being done.
    cause = _leak(failure, before) or _request(failure) or sufficient(failure) or _driver(failure)
    if cause is not None:
        return cause
    candidates = (_activity, _optimizer, _step, _elsewhere)
    cause = next(
        (possible for candidate in candidates if (possible := candidate(failure, before))), None
    )
    if cause is None:
        return None
    return cause._replace(
        clause=cause.clause + mention_of_pieces(failure) + _imbalance(before),
        remedies=(*cause.remedies, *advice_on_pieces(failure)),
    )


def _leak(failure: OutOfMemory, before: Background) -> Cause | None:
    if before.grown is None or not before.steps:
        return None
    if before.grown < max(missing(failure), _LEAST_GROWN * (failure.allocated or 0)):
        return None
    grown = format_bytes(before.grown)
    clause = f"memory in use grew by {grown} in {before.steps:,} steps, to {_in_use(failure)}"
    if before.finding is not None:
        clause += f": {first_sentence(before.finding.title)}"
    return Cause("leak", clause)


def _request(failure: OutOfMemory) -> Cause | None:
    if not failure.is_implausible:
        return None
    if failure.device == "host":
        return Cause("request", f"the whole memory is only {format_bytes(failure.capacity)}")
    return Cause("request", f"the whole device has only {format_bytes(failure.capacity)}")


def _driver(failure: OutOfMemory) -> Cause | None:
    if not any(text in failure.message for text in _DRIVER):
        return None
    return Cause(
        "driver",
        "the driver or a library had no memory for itself, outside PyTorch's allocator",
        (
            "Libraries such as cuBLAS, cuDNN and NCCL take memory beside PyTorch's allocator. "
            "`torch.cuda.set_per_process_memory_fraction(0.9)` leaves them room; a process elsewhere on the "
            "device may hold it, too (`nvidia-smi`).",
        ),
    )


def _pinned(failure: OutOfMemory) -> Cause:
    held = "" if not failure.size else f"; PyTorch holds {format_bytes(failure.size)} of it already"
    return Cause(
        "pinned memory",
        f"a request for page-locked (pinned) memory failed{held}",
        (remedies.PINNED,),
    )


def _activity(failure: OutOfMemory, before: Background) -> Cause | None:
    size = None if failure.size is None else format_bytes(failure.size)
    about = failure.subject or "the optimizer"
    if failure.activity == "optimizer state":
        takes = "" if size is None else f" ({size})"
        clause = f"the first step of {about} makes its state{takes}{_with(failure)}"
        return Cause("activity", clause, (remedies.STATE,))
    if failure.activity == "model to the device":
        return _model(failure, before)
    if failure.activity == "copy of the model":
        takes = "" if size is None else f", which takes {size},"
        clause = f"a copy of the model on the device ({about}){takes} does not fit"
        return Cause("activity", clause, (remedies.COPY,))
    if failure.activity == "DDP buckets":
        takes = "" if size is None else f", which take {size},"
        clause = f"the buckets of DistributedDataParallel for the gradients{takes} do not fit"
        return Cause("activity", clause, (remedies.BUCKETS,))
    if failure.activity == "generation":
        clause = f"in generation{_with(failure)}"
        if size is not None:
            clause += f", {size} of it in the cache of keys and values"
        return Cause("activity", clause, (remedies.CACHE,))
    return _evaluation(failure, before) if failure.activity == "evaluation" else None


def _model(failure: OutOfMemory, before: Background) -> Cause:
    held, size = _held(failure, before), failure.size
    takes = "" if size is None else f", which takes {format_bytes(size)},"
    clause = f"the model (`{failure.subject}`){takes} does not fit{_with(failure)}{held.clause}"
    return Cause("activity", clause, (remedies.MODEL, *held.remedies))


def _optimizer(failure: OutOfMemory, before: Background) -> Cause | None:
    if failure.phase != "optimizer":
        return None
    held, about = _held(failure, before), failure.subject or "the optimizer"
    clause = f"in the step of {about}{_with(failure)}{held.clause}"
    return Cause("activity", clause, (remedies.FOR_TEMPORARY, *held.remedies))


def _evaluation(failure: OutOfMemory, before: Background) -> Cause:
    where = "in evaluation" if failure.subject is None else f"in evaluation (`{failure.subject}`)"
    own = _own(failure, before)
    size = format_bytes(failure.allocated if own is None else own)
    since = "in use" if own is None or before.level is None else "allocated since the last step"
    if failure.gradients:
        return Cause(
            "activity",
            f"{where} with gradients on, which keeps activations for a backward pass ({size} {since})",
            (remedies.NO_GRAD,),
        )
    held = _held(failure, before)
    clause = f"{where} without gradients{_inputs(failure)}, with {size} {since}{held.clause}"
    return Cause("activity", clause, (remedies.EVALUATION, *held.remedies))


def _step(failure: OutOfMemory, before: Background) -> Cause | None:
    if failure.phase not in _PHASES:
        return None
    name, own = _PHASES[failure.phase], _own(failure, before)
    if own is None or failure.allocated is None:
        return Cause("step", f"in the {name}{_with(failure)}")
    stays, so_far = format_bytes(failure.allocated - own), format_bytes(own)
    if before.level is None:
        said = f"{so_far} were allocated beside the model's {stays}"
    else:
        said = f"{so_far} were allocated since the step before, beside {stays}"
    held = _held(failure, before)
    if held.clause:
        return held._replace(clause=f"in the {name}{_inputs(failure)}, {said}{held.clause}")
    if own < _MOST * failure.allocated:
        return Cause("step", f"in the {name}{_inputs(failure)}, {said}")
    return Cause("step", f"the {name} does not fit{_inputs(failure)}: {said}")


def _held(failure: OutOfMemory, before: Background) -> Cause:
    """Return the program's variables that hold much of the memory in use; an empty clause if none does."""
    held, graph, clause, advice = failure.held, failure.graph, "", []
    allocated, own = failure.allocated or 0, _own(failure, before)
    most = allocated if own is None else min(allocated, own)
    if held is not None and held.size >= max(_MOST * most, _LEAST_HELD * allocated):
        tensors = f"{held.tensors:,} tensors ({format_bytes(held.size)})"
        clause += f"; {tensors} besides the model's and the optimizer's are in use"
        if held.name is not None:
            clause = f"; `{held.name}` holds {tensors}"
        advice.append(remedies.HELD)
    if graph is not None and failure.activity is None:
        clause += (
            f"; `{graph.name}` keeps graphs for a backward pass in which most parameters are used at least "
            f"{graph.uses:,} times"
        )
        advice.append(remedies.KEPT_GRAPH)
    return Cause("held", clause, tuple(advice))


def _inputs(failure: OutOfMemory) -> str:
    if not failure.inputs:
        return ""
    first = failure.inputs[0]
    shape = "\N{MULTIPLICATION SIGN}".join(map(str, first.shape))
    return f" (inputs `{first.name}` {shape})"


def _own(failure: OutOfMemory, before: Background) -> int | None:
    """Return the bytes that the failing step had allocated so far; ``None``: unknown.

    Before the first step is complete, these are the bytes besides parameters, buffers and gradients.
    """
    stays = before.level
    if stays is None and failure.step is None and failure.state is not None:
        stays = failure.state.model
    if stays is None or failure.allocated is None or stays > failure.allocated:
        return None
    return failure.allocated - stays


def _elsewhere(failure: OutOfMemory, before: Background) -> Cause | None:
    if failure.line is None:
        return None
    held = _held(failure, before)
    clause = f"{failure.line} requested it{_with(failure)}{held.clause}"
    return held._replace(clause=clause) if held.clause else Cause("elsewhere", clause)


def _imbalance(before: Background) -> str:
    spare = [device for device in before.others if device.reserved < _SPARE * device.capacity]
    if not spare:
        return ""
    least = min(spare, key=lambda device: device.reserved / device.capacity)
    return (
        f"; on {least.name} this process holds only {format_bytes(least.reserved)} of "
        f"{format_bytes(least.capacity)}"
    )


def _with(failure: OutOfMemory) -> str:
    return "" if failure.allocated is None else f", with {_in_use(failure)} in use"


def _in_use(failure: OutOfMemory) -> str:
    of = "" if failure.limit is None else f" of {format_bytes(failure.limit)}"
    return f"{format_bytes(failure.allocated)}{of}"


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop."""
    return text.partition(". ")[0].rstrip(".")


OUT_OF_MEMORY = "out of memory"
WORKER_KILLED = "worker killed"
UNEXPECTED_END = "ended unexpectedly"
"""Values of `Alert.rule` in the alert about the report on a run's bad end."""
OF_ENDS = frozenset({OUT_OF_MEMORY, WORKER_KILLED, UNEXPECTED_END})
"""All values of `Alert.rule` in alerts about the report on a run's bad end."""
_OF_INFERENCE = (None, "forward")
"""Values of `OutOfMemory.phase` of failures that may be outside training, if nothing recorded a graph."""
_OF_ANOTHER_RANK = re.compile(r"rank \d+: ")


def title_with_cause(
    failure: OutOfMemory, last_step: int | None, before: Background = NOTHING_BEFORE
) -> str:
    """Return `failure_title`, followed by the cause if it is known.

    ``before`` describes the memory before the failure.
    """
    if failure.caught:
        return (
            f"Ended with another error {after_step(last_step)} ({failure.raised_as}); before, an allocation "
            f"on {failure.device} had failed, and the program had caught that"
        )
    # If the allocation failed in another thread than the training, steps may have followed.
    failed_after = last_step if failure.state is None else failure.step
    title, cause = failure_title(failure, failed_after), cause_of(failure, before)
    return title if cause is None else f"{title}: {cause.clause}"


def has_gone_on(failure: OutOfMemory, event: Event) -> bool:
    """Return True if a later event shows that the program went on after it had caught a failed allocation.

    A completed step shows it. After a forward pass without gradients, such as an evaluation with a smaller
    batch, there may be no further step. Then a good end of the run shows it.
    """
    if isinstance(event, Batch):
        return True
    is_of_training = failure.gradients is not False or failure.phase not in _OF_INFERENCE
    if failure.step is None or is_of_training:
        return False
    return isinstance(event, End) and event.status == "finished"


def is_title(alert: Alert) -> bool:
    """Return True if an alert's title is the title of the report on this run's own bad end."""
    # An older memlog copied the alerts of other ranks.
    return alert.rule in OF_ENDS and _OF_ANOTHER_RANK.match(alert.title) is None
