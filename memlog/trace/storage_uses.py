"""Type and uses of a storage, as the stream of events encodes them.

A use is a read of the storage by an operation. A moment is the serial number of the storage that is the
newest at that time.

The FREE event of a storage holds the type and the uses. If the storage is live when the trace ends, a USES
event holds the type and the uses. In other events, the same fields have another meaning.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memlog.trace.encoding import StreamEvent

UNKNOWN_TYPE: Final = 0
WIDE: Final = 1
"""Type of a storage: float32, both with autocast and without autocast."""
HALF: Final = 2
"""Type of a storage: float32 without autocast, bfloat16 under autocast."""
OTHER_TYPE: Final = 3
"""Type of a storage: any type except float32, float16 and bfloat16, for example int64 or float64."""
HALF_NOW: Final = 4
"""Type of a storage: bfloat16 or float16 in the traced step."""
HALF_BY_SLOW_CONVOLUTION: Final = 5
"""Type of a storage: `HALF`, and the result of a convolution that oneDNN cannot compute in bfloat16 on this
processor. torch then uses another kernel, with buffers that are several times larger than the input."""

_BITS: Final = 21
_MAX_MOMENT: Final = (1 << _BITS) - 1
MOST_CASTS: Final = 255
"""Maximum of `Uses.casts`. An event stores this number in one byte."""


class Uses(NamedTuple):
    """Type and uses of one storage."""

    type: int
    casts: int
    """Number of reads by matrix products and convolutions in the forward pass. Only reads of `WIDE` storages
    are counted, because autocast casts no other storages."""
    cast_first: int
    """Moment of the first read by a matrix product or convolution, in the forward or the backward pass.
    0: there was no such read, or the storage is not `WIDE`."""
    cast_last: int
    """Moment of the last read by a matrix product or convolution; see `cast_first`."""
    used: int
    """Moment of the last read by any operation except matrix products and convolutions; 0: never."""
    backward_layer: int
    """Number of the first layer whose backward pass read the storage; 0: unknown."""


NOTHING_KNOWN: Final = Uses(UNKNOWN_TYPE, 0, 0, 0, 0, 0)


def packed(cast_first: int, cast_last: int, used: int) -> int:
    """Pack three moments into one 64-bit number."""
    first, last, other = (min(moment, _MAX_MOMENT) for moment in (cast_first, cast_last, used))
    return first << 2 * _BITS | last << _BITS | other


def uses_of(event: StreamEvent) -> Uses:
    """Return the uses that a FREE or USES event holds."""
    first, last, other = (event.size >> shift & _MAX_MOMENT for shift in (2 * _BITS, _BITS, 0))
    return Uses(event.phase, event.thread, first, last, other, event.layer)
