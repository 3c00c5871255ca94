"""Judge whether a run ended because memory ran out, and give the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from memlog._internal.units import format_bytes
from memlog.events import Sample
from memlog.reports.final_state import LastMoments

Writer: TypeAlias = Literal["helper", "sync"]

Level: TypeAlias = Literal["certain", "likely", "possible", "none"]

_NEAR = 0.9
"""Share of a limit above which the limit counts as nearly reached."""
FULL_SHARED_MEMORY = "Bus error"
"""Signal that ends a worker if shared memory has no room for a batch."""
_SPARE = 0.05
"""Share of the memory that the run holds or that is free; if less is free, memory counts as nearly full."""


class Witness(msgspec.Struct, frozen=True):
    """Observations from outside of a trainer that ended without an end event."""

    writer: Writer
    oom_kills: int | None = None
    """Number of processes that the kernel killed for memory in the trainer's control group during the run;
    ``None``: unknown."""


class Suspicion(NamedTuple):
    """How likely memory is the cause, and the evidence for and against it."""

    level: Level
    why: str = ""

    @property
    def of_memory(self) -> bool:
        """True if memory is a plausible cause."""
        return self.level != "none"


def suspect(moments: LastMoments, witness: Witness) -> Suspicion:
    """Judge a run's end by its journal and by the witness."""
    failure = moments.failure
    if failure is not None and failure.signal is None:
        return Suspicion("certain")
    if failure is not None and failure.signal == FULL_SHARED_MEMORY:
        return Suspicion(
            "likely",
            "Workers hand batches over through shared memory (`/dev/shm`), and the kernel ends with this "
            "signal who writes there when it is full: that is the likely cause.",
        )
    if witness.oom_kills:
        processes = "a process" if witness.oom_kills == 1 else f"{witness.oom_kills} processes"
        return Suspicion(
            "likely",
            f"Meanwhile the kernel killed {processes} of its control group for want of memory: that is the "
            "likely cause.",
        )
    short = None if moments.last_sample is None else _short(moments.last_sample)
    if short is not None:
        return Suspicion("possible", f"{short} So memory may be the cause. {_kernel(witness)}")
    if failure is not None:
        return Suspicion(
            "possible",
            "The kernel ends a process with this signal where memory runs out; so may anybody else. "
            f"{_kernel(witness)}",
        )
    return Suspicion("none", " ".join(_nothing(moments, witness)))


def _short(sample: Sample) -> str | None:
    """Return a sentence if the container's or the machine's memory was nearly used up in the last sample."""
    held, limit, left = sample.tree_pss or 0, sample.cgroup_limit, sample.available
    if limit is not None and held >= _NEAR * limit:
        return (
            f"When last looked at, it held {format_bytes(held)} of the {format_bytes(limit)} that its "
            "container may use."
        )
    if left is not None and left <= _SPARE * (left + held):
        return f"When last looked at, the machine had no more than {format_bytes(left)} left."
    return None


def _nothing(moments: LastMoments, witness: Witness) -> Iterator[str]:
    sample = moments.last_sample
    if sample is None and witness.oom_kills is None:
        yield "Nothing that memlog knows points to memory, but it knows little of this run's end."
    elif sample is None or sample.available is None:
        yield "Nothing points to memory as the cause."
    else:
        yield (
            "Nothing points to memory as the cause: when last looked at, the machine had "
            f"{format_bytes(sample.available)} left."
        )
        if witness.oom_kills is None:
            yield "The looks are about a second apart: a sudden jump after the last would not show."
    yield _kernel(witness)


def _kernel(witness: Witness) -> str:
    if witness.oom_kills == 0:
        return "The kernel killed no process of its control group for want of memory meanwhile."
    return (
        "Whether the kernel killed it for want of memory is not known here: on that machine, "
        '`dmesg | grep -i "killed process"` says so.'
    )
