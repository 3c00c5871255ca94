"""Last step in an event file, read without tensorboard's modules. The training process imports this module.

A file holds records: the length in 8 bytes, its checksum in 4, the data, and the data's checksum in 4. The
data is a protocol buffer ``Event``, whose first fields are the time and the step.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from pathlib import Path

from memlog.sink import STEP_PREFIX

_NEWEST = 1000
"""Number of records at the file's end that are searched. A file's steps almost rise, because its writer gets
the events of two processes."""
_LENGTH = struct.Struct("<Q")
_HEADER, _CHECK = 12, 4
_TIME, _STEP = b"\x09", b"\x10"
"""First bytes of the fields ``wall_time``, which takes 9 bytes in all, and ``step``."""
_STEP_AT = 9
_FIRST_RECORD = b"brain.Event:"
"""Text in a file's first record, which has no value."""


def last_step_in(file: Path, *, of_memlog: bool = True) -> int | None:
    """Return the last step with a value in an event file; ``None`` if there is none.

    If ``of_memlog`` is true, only memlog's values count.
    """
    with file.open("rb") as opened:
        try:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # the file is empty
            return None
        with data:
            steps = [
                step_of(record)
                for begin, end in _newest_records(data)
                if (STEP_PREFIX.encode() in (record := data[begin:end]))
                or not (of_memlog or _FIRST_RECORD in record)
            ]
    return max((step for step in steps if step is not None), default=None)


def _newest_records(data: mmap.mmap) -> deque[tuple[int, int]]:
    """Return where the newest complete records begin and end."""
    found: deque[tuple[int, int]] = deque(maxlen=_NEWEST)
    begin = _HEADER
    while begin <= len(data):
        end = begin + _LENGTH.unpack_from(data, begin - _HEADER)[0]
        if end + _CHECK > len(data):
            break
        found.append((begin, end))
        begin = end + _CHECK + _HEADER
    return found


def step_of(record: bytes) -> int | None:
    """Return the step of an ``Event``; ``None`` if the data is no event. A step of 0 is not stored."""
    if record[:1] != _TIME:
        return None
    if record[_STEP_AT : _STEP_AT + 1] != _STEP:
        return 0
    step = 0
    for position, byte in enumerate(record[_STEP_AT + 1 : _STEP_AT + 11]):
        step |= (byte & 0x7F) << 7 * position
        if not byte & 0x80:
            return step
    return None
