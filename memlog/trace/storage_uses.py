"""What a trace says of a storage beside its life: its type, and what used it.

It stands in the FREE of the storage, or in a USES at the end of the trace, in fields that these events have
no other need for. Moments are serials: of the storage that was allocated last.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memlog.trace.encoding import StreamEvent

UNKNOWN: Final = 0
WIDE: Final = 1
"""float32, and would stay so under autocast."""
HALF: Final = 2
"""float32, and would be bfloat16 under autocast."""
OTHER: Final = 3
"""Something else than float32: integers, truth values, float64."""
HALF_NOW: Final = 4
"""bfloat16 or float16."""

_BITS: Final = 21
_MOST: Final = (1 << _BITS) - 1
MOST_CASTS: Final = 255


class Uses(NamedTuple):
    """Of one storage."""

    type: int
    casts: int
    """How many products of the forward pass got it."""
    cast_first: int
    """When the first product got it; 0: none did."""
    cast_last: int
    """When the last did, the backward pass's included."""
    used: int
    """When something else got it last; 0: nothing did."""
    asked: int
    """The layer whose backward pass got it first; 0: none is known."""


NOTHING_KNOWN: Final = Uses(UNKNOWN, 0, 0, 0, 0, 0)


def packed(cast_first: int, cast_last: int, used: int) -> int:
    """Three moments in a number of eight bytes."""
    first, last, other = (min(moment, _MOST) for moment in (cast_first, cast_last, used))
    return first << 2 * _BITS | last << _BITS | other


def uses_of(event: StreamEvent) -> Uses:
    """What a FREE or a USES says."""
    first, last, other = (event.size >> shift & _MOST for shift in (2 * _BITS, _BITS, 0))
    return Uses(event.phase, event.thread, first, last, other, event.layer)
