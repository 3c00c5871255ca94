"""Read pickles of plain values: dictionaries, lists, tuples, text and numbers.

A pickle is a program, and Python's unpickler runs it. It imports the modules that the program names. It
hashes nested keys of any depth, without a limit on time, in C code that Ctrl-C does not interrupt. `loads`
knows only the opcodes that build plain values, so no pickle makes it import or call anything. It hashes only
text and a few small keys and never recurses, so its time and memory grow with the pickle's size only.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from struct import Struct
from typing import Any, NoReturn, TypeAlias

from memlog.errors import UnsafeSnapshotError

_BYTES_PER_CONTAINER = 8
"""Minimum bytes of a pickle for each list, dictionary and tuple that it builds. A snapshot has more than 20.
One byte can ask for an empty dictionary, which takes 64 bytes."""
_CONTAINERS = 1000
"""Containers that a pickle of any size may build."""
_OTHER_KEYS = 4096
"""Maximum number of keys in a pickle that are not text. Numbers can be chosen to have the same hash; each is
then compared with all before it."""
_TUPLE = 16
"""Maximum number of values in a tuple. It may hold no containers: hashing nested tuples may take exponential
time."""
_NAME = 500
"""Maximum characters of a module's or a function's name."""
_TEXT_KEYS = frozenset({str})
_KEYS = frozenset({str, int, tuple})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_STOP = ord(".")
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

_Handler: TypeAlias = Callable[[int], int]
"""Takes the position behind its opcode, and returns the position behind the opcode's argument."""

_U8, _U32, _U64 = Struct("<B"), Struct("<I"), Struct("<Q")


def loads(content: bytes) -> Any:
    """Return the value that a pickle describes.

    Args:
        content: The pickle, of protocol 2 or later, as torch writes it. Bytes after its end are ignored.

    Raises:
        UnsafeSnapshotError: The pickle uses an operation that plain values do not need.
        Exception: The pickle is cut off, or the content is no pickle. Its type varies.
    """
    return _Reader(content).read()


class _Reader:
    """Interpreter of the opcodes that build plain values."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._push = self._stack.append
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._containers_left = _CONTAINERS + len(content) // _BYTES_PER_CONTAINER
        self._other_keys_left = _OTHER_KEYS
        known = {ord(code): handler for code, handler in self._handlers().items()}
        self._table = [known.get(code, self._refuse) for code in range(256)]

    def read(self) -> Any:
        """Run the pickle to its end."""
        content, table = self._content, self._table
        at = 0
        while (opcode := content[at]) != _STOP:
            at = table[opcode](at + 1)
        return self._stack.pop()

    def _handlers(self) -> dict[str, _Handler]:
        return {
            "\x80": lambda at: at + 1,  # the protocol
            "\x95": lambda at: at + 8,  # the length of a frame
            "(": self._mark,
            "N": self._constant(None),
            "\x88": self._constant(True),
            "\x89": self._constant(False),
            ")": self._constant(()),
            "J": self._number(Struct("<i")),
            "K": self._number(_U8),
            "M": self._number(Struct("<H")),
            "\x8a": self._long1,
            "G": self._number(Struct(">d")),
            "\x8c": self._text(_U8),
            "X": self._text(_U32),
            "\x8d": self._text(_U64),
            "]": self._empty(list),
            "}": self._empty(dict),
            "t": self._tuple,
            "\x85": self._short_tuple(1),
            "\x86": self._short_tuple(2),
            "\x87": self._short_tuple(3),
            "a": self._append,
            "e": self._appends,
            "s": self._setitem,
            "u": self._setitems,
            "q": self._put(_U8),
            "r": self._put(_U32),
            "\x94": self._memoize,
            "h": self._get(_U8),
            "j": self._get(_U32),
        }

    def _refuse(self, at: int) -> NoReturn:
        opcode = self._content[at - 1]
        if opcode not in _NAMES:
            raise ValueError(f"byte {at - 1:,} is no opcode")
        name = _NAMES[opcode]
        wanted = f"uses {name}"
        if name in ("GLOBAL", "INST"):
            module, after = self._line(at)
            wanted = f"calls {module}.{self._line(after)[0]}"
        elif name == "STACK_GLOBAL" and all(type(part) is str for part in self._stack[-2:]):
            wanted = f"calls {'.'.join(self._stack[-2:])}"
        raise _unsafe(wanted)

    # Values

    def _constant(self, value: Any) -> _Handler:
        def push(at: int) -> int:
            self._push(value)
            return at

        return push

    def _number(self, kind: Struct) -> _Handler:
        def push(at: int) -> int:
            self._push(kind.unpack_from(self._content, at)[0])
            return at + kind.size

        return push

    def _long1(self, at: int) -> int:
        end = at + 1 + self._content[at]
        self._push(int.from_bytes(self._content[at + 1 : end], "little", signed=True))
        return end

    def _text(self, length: Struct) -> _Handler:
        def push(at: int) -> int:
            begin = at + length.size
            end: int = begin + length.unpack_from(self._content, at)[0]
            self._push(self._content[begin:end].decode("utf-8", "surrogatepass"))
            return end

        return push

    def _line(self, at: int) -> tuple[str, int]:
        end = self._content.index(b"\n", at, at + _NAME)
        return self._content[at:end].decode("utf-8", "replace"), end + 1

    # Containers

    def _mark(self, at: int) -> int:
        self._marks.append(len(self._stack))
        return at

    def _marked(self) -> list[Any]:
        """Take the values since the last mark from the stack."""
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _push_container(self, container: Any) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise _unsafe("builds more lists and dictionaries than its size allows")
        self._push(container)

    def _empty(self, kind: type[list[Any] | dict[Any, Any]]) -> _Handler:
        def push(at: int) -> int:
            self._push_container(kind())
            return at

        return push

    def _tuple(self, at: int) -> int:
        self._push_tuple(self._marked())
        return at

    def _short_tuple(self, length: int) -> _Handler:
        def push(at: int) -> int:
            self._push_tuple(self._taken(length))
            return at

        return push

    def _taken(self, count: int) -> list[Any]:
        """Take the last values from the stack."""
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _push_tuple(self, values: list[Any]) -> None:
        if len(values) > _TUPLE or not _SCALARS.issuperset(map(type, values)):
            raise _unsafe("holds a tuple of many values, or one that holds others")
        self._push_container(tuple(values))

    def _append(self, at: int) -> int:
        value = self._stack.pop()
        self._stack[-1].append(value)
        return at

    def _appends(self, at: int) -> int:
        values = self._marked()
        self._stack[-1].extend(values)
        return at

    def _setitem(self, at: int) -> int:
        self._fill(self._taken(2))
        return at

    def _setitems(self, at: int) -> int:
        self._fill(self._marked())
        return at

    def _fill(self, values: list[Any]) -> None:
        """Put keys and values, one after the other, into the dictionary on the stack."""
        keys = values[::2]
        if not _TEXT_KEYS.issuperset(map(type, keys)):
            self._admit(keys)
        self._stack[-1].update(zip(keys, values[1::2], strict=True))

    def _admit(self, keys: list[Any]) -> None:
        """Count the keys that are not text; raise if there are too many."""
        for key in keys:
            if type(key) not in _KEYS:
                raise _unsafe(f"has a {type(key).__name__} as a key")
            self._other_keys_left -= type(key) is not str
        if self._other_keys_left < 0:
            raise _unsafe("has numbers as keys")

    # Values that are used more than once

    def _memoize(self, at: int) -> int:
        self._memo.append(self._stack[-1])
        return at

    def _put(self, index: Struct) -> _Handler:
        def put(at: int) -> int:
            self._keep(index.unpack_from(self._content, at)[0])
            return at + index.size

        return put

    def _get(self, index: Struct) -> _Handler:
        def push(at: int) -> int:
            self._push(self._memo[index.unpack_from(self._content, at)[0]])
            return at + index.size

        return push

    def _keep(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self._stack[-1])
        elif index < len(self._memo):
            self._memo[index] = self._stack[-1]
        else:  # picklers count up; Python's unpickler would make an array as long as the largest index
            raise ValueError(
                f"its memo has {len(self._memo):,} values, and it sets number {index:,}"
            )


def _unsafe(wanted: str) -> UnsafeSnapshotError:
    return UnsafeSnapshotError(
        f"it {wanted}, which no snapshot does; don't open it with other programs"
    )
