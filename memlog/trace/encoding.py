"""Encoding of the event stream that every engine records, 32 bytes per event.

An event is one `bytes` object of fixed size. One atomic call appends the event to a ``bytearray``, without a
lock. So a finalizer can append an event at any point of the program.

============  =================  ===================  ==============================================
kind          key                size                 meaning
============  =================  ===================  ==============================================
ALLOC         serial             bytes                ``layer`` allocated a storage in ``phase``.
FREE          serial             uses                 The storage was freed. The other fields hold its type
                                                      and uses (`memlog.trace.records`); 0: unknown.
ENTER         serial             serial               A module's ``forward`` begins. The serials name
                                                      its two largest positional tensor arguments.
                                                      Serial 0 means unknown, key -1 means no such tensor.
EXIT          (unused)           (unused)             The ``forward`` ends, by return or by exception.
PHASE_CHANGE  (unused)           (unused)             Later events outside ``forward`` belong to ``layer``
                                                      and ``phase``. Such events come from a backward pass
                                                      or an optimizer's step.
CLASSIFY      serial             (unused)             The storage has ``category`` and belongs to ``layer``.
READING       allocated bytes    reserved bytes       A reading of the allocator's own statistics.
USES          serial             uses                 The storage is live when the trace ends. The fields are
                                                      those of FREE.
LINE          serial             number               A line of the program made the storage outside all
                                                      modules. Number 1 is the first of ``lines``.
                                                      LINE follows the storage's ALLOC.
============  =================  ===================  ==============================================

Serials are never used twice in a trace. Times are nanoseconds since the trace began. An ALLOC in the phase
``BEFORE`` stands for a storage that was live when the trace began. Such an ALLOC can be anywhere in the
stream.
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
WORKSPACE: Final = 10
PRIVATE_POOL: Final = 11
UNSHARDED: Final = 12
COMMUNICATION: Final = 13
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
    "workspaces",
    "private pools",
    "unsharded parameters",
    "communication",
)
"""Names of the categories. Traces in files number them, so a new category goes to the end."""

OUTSIDE: Final = 0
"""Layer number of events that happen in no module."""
OUTSIDE_PATH: Final = "(outside modules)"

_LAYOUT: Final = struct.Struct("<qqqIBBBB")
EVENT_BYTES: Final = _LAYOUT.size
assert EVENT_BYTES == 32  # noqa: S101, PLR2004 - the size that the documentation states


class StreamEvent(NamedTuple):
    key: int
    size: int
    time_ns: int
    layer: int
    kind: int
    phase: int
    category: int
    thread: int


pack = _LAYOUT.pack
"""Function that encodes the fields of a `StreamEvent`, in the order of the fields."""


def decode(events: bytes | memoryview) -> Iterator[StreamEvent]:
    return map(StreamEvent._make, _LAYOUT.iter_unpack(events))


def decode_with_allocations(
    events: bytes | memoryview,
) -> Iterator[tuple[StreamEvent, StreamEvent | None]]:
    """Decode events in order. Pair each ALLOC or FREE with the ALLOC of the same storage.

    Other events, and a FREE whose ALLOC is not in ``events``, are paired with ``None``.
    """
    live: dict[int, StreamEvent] = {}
    for event in decode(events):
        if event.kind == ALLOC:
            live[event.key] = event
            yield event, event
        elif event.kind == FREE:
            yield event, live.pop(event.key, None)
        else:
            yield event, None
