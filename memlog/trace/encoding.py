"""The one stream of events that every engine records, 32 bytes an event.

An event is one `bytes` of fixed size, so that a finalizer, which may run in the middle of anything, can
append one to a ``bytearray`` in a single atomic call, without a lock.

========  =================  ===================  ==================================================
kind      key                size                 meaning
========  =================  ===================  ==================================================
ALLOC     serial             bytes                a storage was allocated by ``layer`` in ``phase``
FREE      serial             uses                 it was freed; its other fields tell its type
                                                  and what used it (`memlog.trace.storage_uses`), or
                                                  are 0
ENTER     serial             serial               a module's ``forward`` begins, on these storages: the
                                                  largest two of its positional arguments. 0: nothing is
                                                  known; a key of -1: no tensor was among them
EXIT      (unused)           (unused)             it ends, by return or by exception
TURN      (unused)           (unused)             from now on what happens outside ``forward`` belongs to
                                                  ``layer`` and ``phase`` (stretches of the backward pass,
                                                  the optimizer's step)
CLASSIFY  serial             (unused)             the storage is of ``category`` and belongs to ``layer``
READING   allocated bytes    reserved bytes       the allocator's own statistics
USES      serial             uses                 as FREE, of a storage that is there as the trace ends
LINE      serial             number               the storage was made in no module, by a line of the program:
                                                  the trace's ``lines`` have it, from 1 on. It follows ALLOC
========  =================  ===================  ==================================================

Serials are never used twice in a trace. Times are nanoseconds since the trace began. An ALLOC in the phase
``BEFORE`` tells of a storage that was there when the trace began, whenever it is said.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

ALLOC: Final = 0
FREE: Final = 1
ENTER: Final = 2
EXIT: Final = 3
PHASE_CHANGE: Final = 4
CLASSIFY: Final = 5
READING: Final = 6
USES: Final = 7
LINE: Final = 8

BEFORE: Final = 0
FORWARD: Final = 1
BACKWARD: Final = 2
RECOMPUTE: Final = 3
OPTIMIZER: Final = 4
PHASES: Final = ("before", "forward", "backward", "recompute", "optimizer")

UNDECIDED: Final = 0
PARAMETER: Final = 1
BUFFER: Final = 2
GRADIENT: Final = 3
OPTIMIZER_STATE: Final = 4
ACTIVATION: Final = 5
RECOMPUTED: Final = 6
TEMPORARY: Final = 7
INPUT: Final = 8
OTHER: Final = 9
CATEGORIES: Final = (
    "undecided",
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "activations",
    "recompute",
    "temporaries",
    "inputs",
    "other",
)

OUTSIDE: Final = 0
"""The number of the layer that stands for "in no module"."""
OUTSIDE_PATH: Final = "(outside modules)"

_LAYOUT: Final = struct.Struct("<qqqIBBBB")
EVENT_BYTES: Final = _LAYOUT.size
assert EVENT_BYTES == 32  # noqa: S101, PLR2004 - the figure that the documentation gives


class StreamEvent(NamedTuple):
    """One decoded event."""

    key: int
    size: int
    time_ns: int
    layer: int
    kind: int
    phase: int
    category: int
    thread: int


pack = _LAYOUT.pack
"""Encodes the fields of a `StreamEvent`, in its order."""


def decode(events: bytes | memoryview) -> Iterator[StreamEvent]:
    """The events again."""
    return map(StreamEvent._make, _LAYOUT.iter_unpack(events))
