"""Type and uses of a storage, as the stream of events encodes them.

The storage's FREE event holds its type and uses. If the storage is live when the trace ends, a USES event
holds them. Both events store them in fields that have another meaning in other events. A moment is given as
the serial of the last storage that was allocated before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memlog.trace.encoding import StreamEvent

UNKNOWN_TYPE: Final = 0
WIDE: Final = 1
"""Type of a storage: float32, with and without autocast."""
HALF: Final = 2
"""Type of a storage: float32 without autocast, bfloat16 under autocast."""
OTHER_TYPE: Final = 3
"""Type of a storage: neither float32, float16 nor bfloat16, but for example integers or float64."""
HALF_NOW: Final = 4
"""Type of a storage: bfloat16 or float16, already in the traced step."""

_BITS: Final = 21
_MAX_MOMENT: Final = (1 << _BITS) - 1
MOST_CASTS: Final = 255


class Uses(NamedTuple):
    """Type and uses of one storage."""

    type: int
    casts: int
    """Number of matrix products and convolutions of the forward pass that read the storage."""
    cast_first: int
    """Moment of the first read that `casts` counts; 0: there is none."""
    cast_last: int
    """Moment of the last read by a product or convolution, in the forward or the backward pass."""
    used: int
    """Moment of the last read by any other operation; 0: there is none."""
    backward_layer: int
    """Layer whose backward pass was the first to read the storage; 0: unknown."""


NOTHING_KNOWN: Final = Uses(UNKNOWN_TYPE, 0, 0, 0, 0, 0)


def packed(cast_first: int, cast_last: int, used: int) -> int:
    """Pack three moments into a number of eight bytes."""
    first, last, other = (min(moment, _MAX_MOMENT) for moment in (cast_first, cast_last, used))
    return first << 2 * _BITS | last << _BITS | other


def uses_of(event: StreamEvent) -> Uses:
    """Return the uses that a FREE or USES event holds."""
    first, last, other = (event.size >> shift & _MAX_MOMENT for shift in (2 * _BITS, _BITS, 0))
    return Uses(event.phase, event.thread, first, last, other, event.layer)
