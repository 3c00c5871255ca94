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
from typing import Any, NoReturn

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

_I32 = Struct("<i").unpack_from
_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from
_F64 = Struct(">d").unpack_from


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
    """Interpreter of the opcodes that build plain values.

    Each handler takes the position behind its opcode and returns the position behind its argument.
    """

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

    def _handlers(self) -> dict[str, Callable[[int], int]]:
        return {
            "\x80": self._protocol,
            "\x95": self._frame,
            "(": self._mark,
            "N": self._none,
            "\x88": self._true,
            "\x89": self._false,
            "J": self._binint,
            "K": self._binint1,
            "M": self._binint2,
            "\x8a": self._long1,
            "G": self._binfloat,
            "\x8c": self._short_binunicode,
            "X": self._binunicode,
            "\x8d": self._binunicode8,
            "]": self._empty_list,
            "}": self._empty_dict,
            ")": self._empty_tuple,
            "t": self._tuple,
            "\x85": self._tuple1,
            "\x86": self._tuple2,
            "\x87": self._tuple3,
            "a": self._append,
            "e": self._appends,
            "s": self._setitem,
            "u": self._setitems,
            "q": self._binput,
            "r": self._long_binput,
            "\x94": self._memoize,
            "h": self._binget,
            "j": self._long_binget,
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

    def _protocol(self, at: int) -> int:
        return at + 1

    def _frame(self, at: int) -> int:
        return at + 8

    # Values

    def _none(self, at: int) -> int:
        self._push(None)
        return at

    def _true(self, at: int) -> int:
        self._push(True)
        return at

    def _false(self, at: int) -> int:
        self._push(False)
        return at

    def _binint(self, at: int) -> int:
        self._push(_I32(self._content, at)[0])
        return at + 4

    def _binint1(self, at: int) -> int:
        self._push(self._content[at])
        return at + 1

    def _binint2(self, at: int) -> int:
        self._push(int.from_bytes(self._content[at : at + 2], "little"))
        return at + 2

    def _long1(self, at: int) -> int:
        end = at + 1 + self._content[at]
        self._push(int.from_bytes(self._content[at + 1 : end], "little", signed=True))
        return end

    def _binfloat(self, at: int) -> int:
        self._push(_F64(self._content, at)[0])
        return at + 8

    def _short_binunicode(self, at: int) -> int:
        return self._text(at + 1, self._content[at])

    def _binunicode(self, at: int) -> int:
        return self._text(at + 4, _U32(self._content, at)[0])

    def _binunicode8(self, at: int) -> int:
        return self._text(at + 8, _U64(self._content, at)[0])

    def _text(self, at: int, length: int) -> int:
        self._push(self._content[at : at + length].decode("utf-8", "surrogatepass"))
        return at + length

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

    def _empty_list(self, at: int) -> int:
        self._push_container([])
        return at

    def _empty_dict(self, at: int) -> int:
        self._push_container({})
        return at

    def _empty_tuple(self, at: int) -> int:
        self._push(())
        return at

    def _tuple(self, at: int) -> int:
        self._push_tuple(self._marked())
        return at

    def _tuple1(self, at: int) -> int:
        return self._short_tuple(at, 1)

    def _tuple2(self, at: int) -> int:
        return self._short_tuple(at, 2)

    def _tuple3(self, at: int) -> int:
        return self._short_tuple(at, 3)

    def _short_tuple(self, at: int, length: int) -> int:
        values = self._stack[-length:]
        del self._stack[-length:]
        self._push_tuple(values)
        return at

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
        values = self._stack[-2:]
        del self._stack[-2:]
        self._fill(values)
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

    def _binput(self, at: int) -> int:
        self._keep(self._content[at])
        return at + 1

    def _long_binput(self, at: int) -> int:
        self._keep(_U32(self._content, at)[0])
        return at + 4

    def _keep(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self._stack[-1])
        elif index < len(self._memo):
            self._memo[index] = self._stack[-1]
        else:  # picklers count up; Python's unpickler would make an array as long as the largest index
            raise ValueError(
                f"its memo has {len(self._memo):,} values, and it sets number {index:,}"
            )

    def _binget(self, at: int) -> int:
        self._push(self._memo[self._content[at]])
        return at + 1

    def _long_binget(self, at: int) -> int:
        self._push(self._memo[_U32(self._content, at)[0]])
        return at + 4


def _unsafe(wanted: str) -> UnsafeSnapshotError:
    return UnsafeSnapshotError(
        f"it {wanted}, which no snapshot does; don't open it with other programs"
    )
