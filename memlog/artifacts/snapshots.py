"""Read downloaded files up to a maximum size, and an allocator's snapshot without running code hidden in it.

A pickle is a program that Python's unpickler runs. The unpickler imports the modules that the program names.
It also hashes nested keys of any depth, which can take unlimited time. `loads` uses the pure-Python unpickler
of the standard library, and allows only the opcodes that build plain values. So no pickle can make `loads`
import or call anything. `loads` hashes only text and a few small keys. So the pickle's size limits the time
and the memory that `loads` needs.

Nearly all bytes of a snapshot's pickle are blocks and changes. torch writes them in one form: the same keys
in the same order, and for each value the same kind of opcode. The unpickler reads the first ones opcode by
opcode, and builds a regular expression from them. What matches it from the first byte to the last is one
entry, so no other opcode can be hidden in it. Entries that do not match are read opcode by opcode.

A snapshot's file is a pickle, and a pickle is a program. A snapshot that ``torch.cuda.memory._snapshot()``
returns consists only of dictionaries, lists, tuples, text and numbers. `memlog.artifacts.snapshots` reads
nothing else.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import pickletools
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias, cast

from memlog._internal.terminal import format_bytes
from memlog.errors import SnapshotError, UnopenableFileError, UnsafeSnapshotError
from memlog.trace.exporters import trace_plot, write_text
from memlog.trace.exporters.snapshots import Entries

MAX_BYTES = 128 * 1024**2
"""Maximum decompressed bytes of a file. Speedscope's page already needs seconds to load a file of a tenth of
this size."""
MAX_PICKLE = 512 * 1024**2
"""Maximum decompressed bytes of a pickle. Speedscope's page loads not the pickle, but a flame graph that
memlog makes. So a pickle may be larger than other files. Reading a pickle usually takes ten times as much
memory as the pickle has bytes, and at most forty times as much."""

PICKLE = b"\x80"
"""First byte of a pickle, from protocol 2 on."""

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""First bytes of a text that some editors on Windows saved. No format of JSON has them."""


def read_content(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzip.

    After decompression, a pickle may have up to `MAX_PICKLE` bytes. Any other file may have up to `MAX_BYTES`
    bytes. The file's content tells its kind; the file's name is ignored.

    Raises:
        UnopenableFileError: The file is no plain file, is too large, or is damaged gzip.
        OSError: The file can't be read.
    """
    # Reading a pipe may block, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnopenableFileError(f"{path} is no file: pass the path of a file")
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        content, limit = _unpacked(path, file) if packed else _read(file)
    if len(content) > limit:
        raise UnopenableFileError(f"{path} is larger than {format_bytes(limit)}: it is not opened")
    return content.removeprefix(_BYTE_ORDER_MARK)


def _read(file: BinaryIO) -> tuple[bytes, int]:
    head = file.read(len(PICKLE))
    limit = MAX_PICKLE if head == PICKLE else MAX_BYTES
    # One byte more than the limit, so that the caller can detect a larger file.
    return head + file.read(limit + 1 - len(head)), limit


def _unpacked(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    try:
        with cast("BinaryIO", gzip.GzipFile(fileobj=file)) as unpacked:
            return _read(unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnopenableFileError(
            f"{path} is damaged ({error}): fetch it again with `memlog pull`"
        ) from error


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


def _dispatch_opcodes() -> dict[int, _Load]:
    codes = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
    known: dict[int, _Load] = _InPython.dispatch
    table = {code: _refused(name) for name, code in codes.items()}
    table |= {codes[name]: known[codes[name]] for name in _PLAIN.split()}
    table |= {codes[name]: _counted(known[codes[name]]) for name in _CONTAINER_OPCODES}
    table |= {codes[name]: _tuple(_counted(known[codes[name]])) for name in _TUPLE_OPCODES}
    table[codes["SETITEM"]] = _with_keys(known[codes["SETITEM"]], slice(-2, -1))
    table[codes["SETITEMS"]] = _with_keys(known[codes["SETITEMS"]], slice(None, None, 2))
    return table


PlainUnpickler.dispatch = _dispatch_opcodes()


def _unsafe(wanted: str) -> UnsafeSnapshotError:
    return UnsafeSnapshotError(
        f"it {wanted}, which no snapshot of torch does, so it may be malicious; don't open it with other "
        "programs"
    )


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


MAX_SNAPSHOT = 1 << 30
"""Maximum bytes of a snapshot that memlog reads. This is enough for a history of 65,536 entries with stacks.
Such a snapshot has a few hundred million bytes."""


def read_snapshot(path: str | PathLike[str], *, max_bytes: int = MAX_SNAPSHOT) -> dict[str, Any]:
    """Read a snapshot's file.

    Args:
        path: A file that ``torch.cuda.memory._dump_snapshot()`` or memlog wrote, gzip or not.
        max_bytes: Maximum bytes of the file, decompressed. A larger file is not read.

    Returns:
        The snapshot, with the keys ``segments`` and ``device_traces``.

    Raises:
        UnsafeSnapshotError: The file would import something, or contains values that a snapshot never has.
        SnapshotError: The file is no snapshot, can't be read, or is too large.
    """
    return parse_snapshot(_content(Path(path), max_bytes), str(path))


def _content(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > max_bytes:
                raise SnapshotError(_too_large(file, max_bytes))
            content = opened.read(size or max_bytes)  # a pipe has the size 0
        if content.startswith(GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
                content = unpacked.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise SnapshotError(_too_large(file, max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SnapshotError(f"{file} is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise SnapshotError(f"{file} can't be read: {error.strerror or error}") from None
    return content


def _too_large(file: Path, max_bytes: int) -> str:
    return f"{file} is larger than {max_bytes:,} bytes; raise max_bytes to read it"


def draw_snapshot(path: str | PathLike[str], output_path: str | PathLike[str]) -> Path:
    """Draw a snapshot's history as an HTML page that needs neither the network nor scripts.

    Args:
        path: The snapshot's file.
        output_path: Path of the page.

    Returns:
        The path of the page.

    Raises:
        UnsafeSnapshotError: The file would import something, or contains values that a snapshot never has.
        SnapshotError: The file is no snapshot, can't be read, or is too large.
    """
    unpickler = SnapshotUnpickler(_content(Path(path), MAX_SNAPSHOT))
    snapshot = _checked(unpickler.load, str(path))
    return write_text(trace_plot(snapshot, Path(path).name, unpickler.frames), output_path)


def parse_snapshot(content: bytes, name: str = "the snapshot") -> dict[str, Any]:
    """Return the snapshot that the bytes of a pickle describe. Error messages contain ``name``.

    Raises:
        UnsafeSnapshotError: The pickle would import something, or contains values that a snapshot never has.
        SnapshotError: The content is no pickle of a snapshot.
    """
    return _checked(lambda: loads(content), name)


def _checked(load: Callable[[], Any], name: str) -> dict[str, Any]:
    try:
        document = load()
    except UnsafeSnapshotError as error:
        raise UnsafeSnapshotError(f"{name}: {error}") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
        raise SnapshotError(
            f"{name} is no pickle of a snapshot ({type(error).__name__}); fetch it again"
        ) from None
    if isinstance(document, list):  # memory_snapshot() gives the list alone
        document = {"segments": document, "device_traces": []}
    keys = ("segments", "device_traces")
    if not isinstance(document, dict) or not all(isinstance(document.get(k), list) for k in keys):
        raise SnapshotError(
            f"{name} has no segments and device_traces; pass a file that _dump_snapshot() wrote"
        )
    return document
