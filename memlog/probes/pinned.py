"""Page-locked (pinned) memory of the host that torch's caching host allocator holds."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class PinnedSizes(NamedTuple):
    """Pinned memory of this process, in bytes."""

    held: int
    """Bytes in blocks in use and in freed blocks, which the allocator keeps for later requests."""
    in_use: int
    peak: int
    """Highest ``held`` since the process began, or since other code last reset this statistic."""


def read_pinned() -> PinnedSizes | None:
    """Return the pinned memory that torch holds; ``None`` if unknown, or if CUDA is not initialised.

    A call takes about 5 µs. Memory that a program locks in another way does not count.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    read = getattr(cuda, "host_memory_stats_as_nested_dict", None)  # torch before 2.7 lacks it
    stats = {} if read is None else read()
    if "reserved_bytes" in stats:  # older versions, in which ``allocated_bytes`` are those in use
        held, in_use = stats["reserved_bytes"], stats["allocated_bytes"]
    elif "active_bytes" in stats:
        held, in_use = stats["allocated_bytes"], stats["active_bytes"]
    else:
        return None
    return PinnedSizes(int(held["current"]), int(in_use["current"]), int(held["peak"]))
