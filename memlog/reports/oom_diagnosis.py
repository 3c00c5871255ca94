"""Judge whether a run ended because memory ran out, and give the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.events import RESERVED, Finding, Sample, readings
from memlog.facts.oom_cause import Background, DeviceLevel, cause_of
from memlog.facts.oom_room import Cause
from memlog.findings import ranked
from memlog.reports.final_state import FinalState
from memlog.reports.growth_causes import GrowthCauses, levels

_NEAR = 0.9
"""If the run holds at least this share of the container's limit, the limit counts as nearly reached."""
FULL_SHARED_MEMORY = "Bus error"
"""Name of the signal with which the kernel ends a worker if shared memory has no room for a batch."""
_SPARE = 0.05
"""If available memory is at most this share of (available memory + the run's memory), the machine's memory
counts as nearly full."""


class Witness(msgspec.Struct, frozen=True):
    """Another process's observations of a training process that ended without an end event."""

    writer: Literal["helper", "sync"]
    oom_kills: int | None = None
    """Number of processes in the trainer's control group that the kernel killed during the run, for lack of
    memory; ``None``: unknown."""


class OutOfMemoryLikelihood(NamedTuple):
    """Likelihood (one of four levels) that lack of memory ended the run, and the evidence for it."""

    level: Literal["certain", "likely", "possible", "none"]
    why: str = ""

    @property
    def of_memory(self) -> bool:
        """True if memory is a plausible cause."""
        return self.level != "none"


def cause(state: FinalState, growth: GrowthCauses) -> Cause | None:
    """Return the cause of the failed allocation that ended a run; ``None`` if it is unknown."""
    failure = state.failure
    return None if failure is None else cause_of(failure, background(state, growth))


def background(state: FinalState, growth: GrowthCauses) -> Background:
    """Return the memory of the failed device before the failure."""
    failed_after = None if state.failure is None else state.failure.step
    series = [
        memory
        for memory in levels(state)
        if failed_after is not None and memory.step <= failed_after
    ]
    kept = growth.growth if growth.keeps else None
    return Background(
        level=series[-1].level if series else None,
        grown=None if kept is None else kept.size,
        steps=0 if kept is None else kept.steps,
        finding=_of_kept_memory(state),
        others=list(_other_devices(state)),
    )


def _of_kept_memory(state: FinalState) -> Finding | None:
    """Return the most important finding about memory that the program keeps; ``None`` if there is none."""
    return next(
        (finding for finding in ranked(state.findings) if finding.kind.startswith("kept")), None
    )


def _other_devices(state: FinalState) -> Iterator[DeviceLevel]:
    failed = None if state.failure is None else state.failure.device
    for reading in readings(state.steps[-1]) if state.steps else ():
        if (
            reading.name.endswith(RESERVED)
            and reading.owner != failed
            and reading.level is not None
        ):
            device = state.devices.get(reading.owner)
            if device is not None and device.capacity:
                yield DeviceLevel(reading.owner, reading.level, device.capacity)


def suspect(state: FinalState, witness: Witness) -> OutOfMemoryLikelihood:
    failure = state.failure
    if failure is not None and failure.signal is None:
        return OutOfMemoryLikelihood("certain")
    if failure is not None and failure.signal == FULL_SHARED_MEMORY:
        return OutOfMemoryLikelihood(
            "likely",
            "Workers pass batches through shared memory (`/dev/shm`). If it is full, the kernel ends a "
            "process that writes there with this signal. That is the likely cause.",
        )
    # The ranks of a training can share a control group. The kernel kills by SIGKILL only.
    may_be_killed = state.exit is None or (
        state.exit.signal in (None, "SIGKILL") and not state.exit.code
    )
    if witness.oom_kills and may_be_killed:
        processes = "a process" if witness.oom_kills == 1 else f"{witness.oom_kills} processes"
        return OutOfMemoryLikelihood(
            "likely",
            f"During the run the kernel killed {processes} of its control group because memory ran out. That "
            "is the likely cause.",
        )
    short = None if state.last_sample is None else _short(state.last_sample, _on_shared(state))
    if short is not None:
        return OutOfMemoryLikelihood(
            "possible", f"{short} So memory may be the cause. {_kernel(witness)}"
        )
    if failure is not None:
        return OutOfMemoryLikelihood(
            "possible",
            "The kernel ends a process with this signal if memory runs out, but others can send it, too. "
            f"{_kernel(witness)}",
        )
    return OutOfMemoryLikelihood("none", " ".join(_nothing(state, witness)))


def _on_shared(state: FinalState) -> int:
    """Return the bytes that the run's allocators held on devices that share the host's memory."""
    return sum(
        reading.level or 0
        for reading in (readings(state.steps[-1]) if state.steps else ())
        if reading.name.endswith(RESERVED)
        and reading.owner in state.devices
        and state.devices[reading.owner].shares_host
    )


def _short(sample: Sample, on_shared: int) -> str | None:
    """Return a sentence if the container's or the machine's memory was nearly used up in the last sample.

    ``on_shared`` are the run's bytes of the machine's memory that belong to devices.
    """
    held, limit, left = sample.tree_pss or 0, sample.cgroup_limit, sample.available
    if limit is not None and held >= _NEAR * limit:
        return (
            f"In the last sample, it held {format_bytes(held)} of the {format_bytes(limit)} that its "
            "container may use."
        )
    if left is not None and left <= _SPARE * (left + held + on_shared):
        return f"In the last sample, the machine had only {format_bytes(left)} available."
    return None


def _nothing(state: FinalState, witness: Witness) -> Iterator[str]:
    sample = state.last_sample
    if state.grew:
        yield _rising(sample)
    elif sample is None and witness.oom_kills is None:
        yield "Nothing points to memory as the cause, but memlog knows little about this run's end."
    elif sample is None or sample.available is None:
        yield "Nothing points to memory as the cause."
    else:
        yield (
            "Nothing points to memory as the cause: in the last sample, the machine had "
            f"{format_bytes(sample.available)} available."
        )
        if witness.oom_kills is None:
            yield "Samples are about a second apart: they do not show a sudden jump after the last one."
    yield _kernel(witness)


def _rising(sample: Sample | None) -> str:
    if sample is None or sample.available is None:
        return "Memory rose until the end. How much was free then is unknown, so memory may be the cause."
    return (
        "Memory rose until the end, but the last sample shows no shortage: the machine had "
        f"{format_bytes(sample.available)} available. Samples are about a second apart: they do not show a "
        "sudden jump after the last one."
    )


def _kernel(witness: Witness) -> str:
    if witness.oom_kills == 0:
        return "During the run the kernel killed no process of its control group because of memory."
    if witness.oom_kills:
        return "During the run the kernel killed another process of its control group because memory ran out."
    return (
        "It is unknown whether the kernel killed it because memory ran out: on that machine, "
        '`dmesg | grep -i "killed process"` shows that.'
    )
