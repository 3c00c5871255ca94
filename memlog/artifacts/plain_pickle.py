"""Read pickles of plain values: dictionaries, lists, tuples, text and numbers.

A pickle is a program that Python's unpickler runs. The unpickler imports the modules that the program names.
It also hashes nested keys of any depth, which can take unlimited time. `loads` uses the pure-Python unpickler
of the standard library, and allows only the opcodes that build plain values. So no pickle can make `loads`
import or call anything. `loads` hashes only text and a few small keys. So the pickle's size limits the time
and the memory that `loads` needs.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from memlog.errors import UnsafeSnapshotError

_BYTES_PER_CONTAINER = 8
"""Minimum bytes of a pickle for each container. The first `_CONTAINERS` containers do not count.
memlog refuses a pickle with fewer bytes.

Containers are lists, dictionaries, tuples, and the marks that the opcode MARK puts on the unpickler's stack.
The limit is needed because one byte of a pickle can create an empty dictionary of 64 bytes. A snapshot has
more than 10 bytes per container."""
_CONTAINERS = 1000
"""Number of containers that every pickle may build, even the smallest. For each further container, the
pickle must have `_BYTES_PER_CONTAINER` bytes."""
_OTHER_KEYS = 4096
"""Maximum number of keys that are not text, in all dictionaries of a pickle. memlog refuses a pickle with
more such keys. An attacker can choose numbers that have the same hash. Python would compare each of these
keys with all earlier keys, which takes too long."""
_TUPLE = 16
"""If a tuple has more values than this, memlog refuses the pickle. memlog also refuses a tuple that holds
containers, because hashing nested tuples can take exponential time."""
_NAME = 500
"""Maximum characters of a function's full name in a message."""
_TEXT_KEYS = frozenset({str})
_KEYS = frozenset({str, int, tuple})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN = (
    "PROTO FRAME STOP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 APPEND APPENDS"
)
"""Names of the opcodes that the standard library's unpickler runs without a check by memlog. memlog checks or
refuses every other opcode."""
_CONTAINER_OPCODES = ("MARK", "EMPTY_LIST", "EMPTY_DICT")
_TUPLE_OPCODES = ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")

_InPython: Any = pickle._Unpickler  # noqa: SLF001 - the public one is in C, and runs every opcode
_Load: TypeAlias = "Callable[[PlainUnpickler], None]"


def loads(content: bytes) -> Any:
    """Return the value that a pickle describes.

    The pickle must have protocol 2 or later, as torch writes it. Bytes after its end are ignored.

    Raises:
        UnsafeSnapshotError: The pickle uses an operation that plain values do not need.
        Exception: The pickle is cut off, or the content is no pickle. The exception's type varies.
    """
    return PlainUnpickler(content).load()


class _Memo(list[Any]):
    """The unpickler's numbered values, as a list. A dictionary would take ten times as much memory."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if index == len(self):
            self.append(value)
        else:
            # Picklers number values without gaps, so a larger index is an error.
            super().__setitem__(index, value)


class PlainUnpickler(_InPython):  # type: ignore[misc]
    """Unpickler that `loads` uses. A subclass can handle further opcodes in a copy of ``dispatch``."""

    dispatch: ClassVar[dict[int, _Load]]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.memo = _Memo()
        self._containers_left = _CONTAINERS + len(content) // _BYTES_PER_CONTAINER
        self._other_keys_left = _OTHER_KEYS

    def count_container(self) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise _unsafe("builds more lists and dictionaries than its size allows")

    def check_tuple(self) -> None:
        values = self.stack[-1]
        if len(values) > _TUPLE or not _SCALARS.issuperset(map(type, values)):
            raise _unsafe("has a tuple that is long or has containers in it")

    def check_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if type(key) not in _KEYS:
                raise _unsafe(f"has a {type(key).__name__} as a key")
            self._other_keys_left -= type(key) is not str
        if self._other_keys_left < 0:
            raise _unsafe("has numbers as keys")

    def refuse(self, opcode: str) -> None:
        """Raise an error that names the function that the pickle would call.

        If the function's name is unknown, the error names the opcode.
        """
        called: list[str] = []
        if opcode in ("GLOBAL", "INST"):
            called = [self.readline().strip().decode("utf-8", "replace") for _ in range(2)]
        elif opcode == "STACK_GLOBAL":
            called = [part for part in self.stack[-2:] if type(part) is str]
        raise _unsafe(f"calls {'.'.join(called)[:_NAME]}" if called else f"uses {opcode}")


def _counted(load: _Load) -> _Load:
    def counted(reader: PlainUnpickler) -> None:
        reader.count_container()
        load(reader)

    return counted


def _tuple(load: _Load) -> _Load:
    def checked(reader: PlainUnpickler) -> None:
        load(reader)
        reader.check_tuple()

    return checked


def _with_keys(load: _Load, keys: slice) -> _Load:
    """Return a function that checks a dictionary's keys before ``load`` hashes them.

    ``keys``: positions of the keys on the unpickler's stack.
    """

    def checked(reader: PlainUnpickler) -> None:
        given = reader.stack[keys]
        if not _TEXT_KEYS.issuperset(map(type, given)):
            reader.check_keys(given)
        load(reader)

    return checked


def _refused(name: str) -> _Load:
    return lambda reader: reader.refuse(name)


def _dispatch() -> dict[int, _Load]:
    codes = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
    known: dict[int, _Load] = _InPython.dispatch
    table = {code: _refused(name) for name, code in codes.items()}
    table |= {codes[name]: known[codes[name]] for name in _PLAIN.split()}
    table |= {codes[name]: _counted(known[codes[name]]) for name in _CONTAINER_OPCODES}
    table |= {codes[name]: _tuple(_counted(known[codes[name]])) for name in _TUPLE_OPCODES}
    table[codes["SETITEM"]] = _with_keys(known[codes["SETITEM"]], slice(-2, -1))
    table[codes["SETITEMS"]] = _with_keys(known[codes["SETITEMS"]], slice(None, None, 2))
    return table


PlainUnpickler.dispatch = _dispatch()


def _unsafe(wanted: str) -> UnsafeSnapshotError:
    return UnsafeSnapshotError(
        f"it {wanted}, which no snapshot of torch does, so it may be malicious; don't open it with other "
        "programs"
    )
