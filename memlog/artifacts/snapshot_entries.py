"""Read a snapshot's blocks and changes as columns, without an object for each of them.

Nearly all bytes of a snapshot's pickle are blocks and changes. torch writes them in one form: the same keys
in the same order, and for each value the same kind of opcode. The unpickler reads the first ones opcode by
opcode, and builds a regular expression from them. What matches it from the first byte to the last is one
entry, so no other opcode can be hidden in it. Entries that do not match are read opcode by opcode.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from memlog.artifacts.plain_pickle import PlainUnpickler
from memlog.trace.exporters.snapshot_reading import Entries


def _counted_bytes(most: int) -> bytes:
    """Return the pattern of a byte that counts the bytes after it, with these bytes."""
    return b"(?:%s)" % b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(most + 1))


_INTEGER = rb"(?:K.|M..|J.{4}|\x8a%s)" % _counted_bytes(9)
_REFERENCE = rb"(?:h.|j.{4})"
_FRAMES = rb"(?:%s|\]\x94(?:\(%s+e|%sa)?)" % (_REFERENCE, _REFERENCE, _REFERENCE)
_TEXT = rb"(?:%s|\x8c%s\x94)" % (_REFERENCE, _counted_bytes(255))
_TUPLES = (
    rb"\)",
    rb"(?:%s|%s\x85\x94)" % (_REFERENCE, _INTEGER),
    rb"(?:%s|%s{2}\x86\x94)" % (_REFERENCE, _INTEGER),
    rb"(?:%s|%s{3}\x87\x94)" % (_REFERENCE, _INTEGER),
)
"""Patterns of tuples of 0, 1, 2 and 3 whole numbers."""
_OTHERS = {int: _INTEGER, float: rb"G.{8}", bool: rb"[\x88\x89]", type(None): rb"N"}
_BLOCK, _CHANGE = ("address", "size", "state"), ("addr", "size", "action")
_MOST_SHAPES = 16
"""Maximum number of forms that get a regular expression. A snapshot of torch has about two."""
_EVERY_LIST = re.compile(_FRAMES, re.DOTALL)
_EVERY_REFERENCE = re.compile(_REFERENCE, re.DOTALL)
_NEW_LIST, _NEW_TEXT, _LONG1, _BININT = b"]\x8c\x8aJ"
_NOT_NUMBERED = b"hj)"
_SHORTER = 256
"""Numbers in the memo below this have the shorter opcode."""


class SnapshotUnpickler(PlainUnpickler):
    """Unpickler that makes `Entries` of successive blocks or changes in a list."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._content = content
        self._file = io.BytesIO(content)
        self._file_read, self._file_readline = self._file.read, self._file.readline
        self._shapes: dict[tuple[Any, ...], _Shape] = {}

    def frames(self, stack: Any) -> Any:
        """Return the list of frames that a stack of `Entries` is, or stands for."""
        if type(stack) is not int:
            return stack
        found = _EVERY_LIST.match(self._content, stack)
        numbers = map(_index, _EVERY_REFERENCE.findall(found[0]) if found else ())
        # Nothing has checked the references of a damaged snapshot.
        return [self.memo[number] if number < len(self.memo) else None for number in numbers]

    def load_entries(self) -> bool:
        """Push the entries that begin with the present opcode. Return False if there are none."""
        start = self._file.tell() - 1
        for shape in self._shapes.values():
            entries, end = shape.read(self._content, start, self.memo)
            if entries:
                self.append(entries)
                self._file.seek(end)
                return True
        return False

    def learn(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Remember the form of a dictionary, if it is a block or a change."""
        names = next((each for each in (_BLOCK, _CHANGE) if {*each}.issubset(keys)), None)
        form = (*keys, *map(type, values))
        if names and form not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[form] = _Shape(names, dict(zip(keys, values, strict=True)), self.memo)


class _Shape:
    """Regular expression of a block or a change."""

    def __init__(
        self, names: tuple[str, str, str], example: dict[str, Any], memo: list[Any]
    ) -> None:
        address, size, kind = names
        keys = list(example)
        self._columns = keys.index(address), keys.index(size), keys.index(kind)
        self._requested = keys.index("requested_size") if "requested_size" in keys else None
        self._frames = keys.index("frames") if "frames" in keys else None
        patterns = {address: _INTEGER, size: _INTEGER, kind: _REFERENCE, "frames": _FRAMES}
        references = _references(example, memo)
        parts = [
            references[key] + b"(" + (patterns.get(key) or _pattern(value)) + b")"
            for key, value in example.items()
        ]
        self._match = re.compile(rb"\}\x94\(" + b"".join(parts) + b"u", re.DOTALL).match
        self._memoized = [
            index
            for index, (key, value) in enumerate(example.items())
            if key == "frames" or (key != kind and type(value) in (str, tuple))
        ]
        """Groups whose value the pickle numbers, unless it is a reference."""

    def read(self, content: bytes, at: int, memo: list[Any]) -> tuple[Entries, int]:
        """Read successive entries, and number their values in the unpickler's memo.

        The stack of an entry is the position of its list of frames, unless the unpickler has built this list.

        Returns:
            The entries, and the position after them.
        """
        entries, match, memoized = Entries(), self._match, self._memoized
        (address, size, kind), requested, frames = self._columns, self._requested, self._frames
        while (found := match(content, at)) is not None:
            at = found.end()
            values = found.groups()
            entries.addresses.append(_integer(values[address]))
            entries.sizes.append(_repeated_integer(values[size]))
            entries.requested.append(
                0 if requested is None else _repeated_integer(values[requested])
            )
            memo.append(None)  # the entry itself, to which torch never refers
            stack = None
            for index in memoized:
                value = values[index]
                opcode = value[0]
                if opcode == _NEW_LIST:
                    stack = found.start(index + 1)
                    memo.append(stack)
                elif opcode == _NEW_TEXT:
                    memo.append(str(value[2:-1], "utf-8", "surrogatepass"))
                elif opcode not in _NOT_NUMBERED:
                    memo.append(None)
            if stack is None and frames is not None:
                stack = memo[_index(values[frames])]
            entries.stacks.append(stack)
            entries.kinds.append(memo[_repeated_index(values[kind])])
        return entries, at


def _integer(value: bytes) -> int:
    if value[0] == _LONG1:
        return int.from_bytes(value[2:], "little", signed=True)
    return int.from_bytes(value[1:], "little", signed=value[0] == _BININT)


_repeated_integer = lru_cache(maxsize=4096)(_integer)


def _index(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


_repeated_index = lru_cache(maxsize=4096)(_index)


def _pattern(value: Any) -> bytes:
    """Return the pattern of a value of the same form; one that nothing matches for a form of no pattern."""
    if type(value) is str:
        return _TEXT
    if type(value) is tuple and len(value) < len(_TUPLES) and {*map(type, value)} <= {int}:
        return _TUPLES[len(value)]
    return _OTHERS.get(type(value), rb"(?!)")


def _references(keys: Collection[str], memo: list[Any]) -> dict[str, bytes]:
    """Return for each of the keys the pattern of a reference to this text."""
    opcodes: dict[str, list[bytes]] = {key: [] for key in keys}
    for number, value in enumerate(memo):
        if type(value) is str and value in opcodes:
            opcodes[value].append(
                b"h%c" % number if number < _SHORTER else b"j" + number.to_bytes(4, "little")
            )
    return {key: b"(?:%s)" % b"|".join(map(re.escape, each)) for key, each in opcodes.items()}


def _dispatch() -> dict[int, Any]:
    table = PlainUnpickler.dispatch.copy()
    empty_dict, setitems = table[pickle.EMPTY_DICT[0]], table[pickle.SETITEMS[0]]

    def load_empty_dict(reader: SnapshotUnpickler) -> None:
        if not reader.load_entries():
            empty_dict(reader)

    def load_setitems(reader: SnapshotUnpickler) -> None:
        keys, values = reader.stack[::2], reader.stack[1::2]
        setitems(reader)
        reader.learn(keys, values)

    def load_frame(reader: SnapshotUnpickler) -> None:
        reader.read(8)  # the number of bytes up to the next such opcode

    new = {
        pickle.EMPTY_DICT: load_empty_dict,
        pickle.SETITEMS: load_setitems,
        pickle.FRAME: load_frame,
    }
    return table | {opcode[0]: load for opcode, load in new.items()}


SnapshotUnpickler.dispatch = _dispatch()
