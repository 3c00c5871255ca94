"""Reading of an allocator's snapshot: its blocks and changes in columns, and flame graphs of memory by stack.

A snapshot is untrusted input: it can hold plain types in any shape. A snapshot is refused if it does not have
the form that torch writes, or if it has too many entries or devices.

A dictionary or a tuple for each of them would take five to thirty times as much memory.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol, TypeVar

from memlog._internal.terminal import format_bytes
from memlog.errors import SnapshotError
from memlog.trace.exporters.profiles import Frames, Stack, sampled, speedscope_file

_MAX_DEVICES = 16
_MAX_ENTRIES = 5_000_000
_MAX_TEXT = 200
MAX_SIZE = 1 << 50
MAX_ADDRESS = 1 << 64

STATES = {
    "active_allocated": "[allocated]",
    "active_pending_free": "[freed, waiting for another stream]",
    "inactive": "[unused]",
}


class Entries:
    """Successive entries of one of a snapshot's lists.

    Attributes:
        addresses: Addresses of the blocks.
        sizes: Bytes of the blocks.
        kinds: States of blocks, or actions of changes.
        requested: Bytes that the program requested for blocks; 0 if unknown.
        stacks: Lists of frames, or numbers by which the entries' reader finds these lists.
    """

    def __init__(self) -> None:
        self.addresses = array("Q")
        self.sizes = array("Q")
        self.kinds: list[Any] = []
        self.requested = array("Q")
        self.stacks: list[Any] = []

    def __len__(self) -> int:
        return len(self.sizes)


class _DeviceOfSnapshot(Protocol):
    def add_blocks(self, segment: dict[str, Any], blocks: list[Any]) -> None: ...

    def add_history(self, history: list[Any]) -> None: ...


_D = TypeVar("_D", bound=_DeviceOfSnapshot)


class Block(NamedTuple):
    """A block of a segment, free or in use."""

    segment: str
    pool: str
    address: int
    size: int
    state: str
    source: dict[str, Any]


class Change(NamedTuple):
    """An allocation or a free in the history."""

    address: int
    size: int
    is_alloc: bool
    source: dict[str, Any]


class DeviceSnapshot:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.history: list[Change] = []
        self.failed: list[int] = []

    def add_blocks(self, segment: dict[str, Any], blocks: list[Any]) -> None:
        self.blocks += [_block(segment, block) for block in blocks]

    def add_history(self, history: list[Any]) -> None:
        for entry in history:
            _add_entry(self, entry)

    def before(self) -> dict[int, tuple[dict[str, Any] | None, int]]:
        """Return the blocks that were live when the history began, by address.

        Each value is a pair of the block's entry in the snapshot (``None`` if unknown) and the block's bytes.
        """
        first = first_changes(
            (change.address, change.size, change.is_alloc) for change in self.history
        )
        live: dict[int, tuple[dict[str, Any] | None, int]] = {
            address: (None, freed) for address, freed in first.items() if freed is not None
        }
        for block in self.blocks:
            if block.state == "active_allocated" and block.address not in first:
                requested = requested_size(block.source.get("requested_size"), block.size)
                live[block.address] = (block.source, requested)
        return live


def first_changes(history: Iterable[tuple[int, int, int]]) -> dict[int, int | None]:
    """Return for each address the bytes that the first change at it frees; ``None`` if it allocates.

    If it frees a block, the block was live when the history began. A block that is in use at the end was live
    then, too, if its address has no change.

    Args:
        history: Address, bytes, and True for an allocation, of each change.
    """
    first: dict[int, int | None] = {}
    for address, size, is_alloc in history:
        if address not in first:
            first[address] = None if is_alloc else size
    return first


def read_devices(snapshot: Mapping[str, Any], name: str) -> dict[int, DeviceSnapshot]:
    """Return each device that has blocks or a history in a snapshot, by device number.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes, or is too large.
    """
    return {
        number: device
        for number, device in read_as(DeviceSnapshot, snapshot, name).items()
        if device.blocks or device.history
    }


def read_as(kind: Callable[[], _D], snapshot: Mapping[str, Any], name: str) -> dict[int, _D]:
    """Return an object of ``kind`` for each device of a snapshot, by device number.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes, or is too large.
    """
    try:
        return dict(sorted(_devices(kind, snapshot).items()))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SnapshotError(
            f"{name} is damaged ({printable(str(error))}): write it again with _dump_snapshot()"
        ) from None


def _devices(kind: Callable[[], _D], snapshot: Mapping[str, Any]) -> dict[int, _D]:
    devices: dict[int, _D] = {}
    remaining = _MAX_ENTRIES
    _require_distinct([segment["blocks"] for segment in snapshot["segments"] if segment["blocks"]])
    _require_distinct([history for history in snapshot["device_traces"] if history])
    for segment in snapshot["segments"]:
        number = whole_number(segment.get("device", 0), "a device's number")
        device = devices.setdefault(number, kind())
        remaining -= _number(segment["blocks"]) + 1
        _require_bounded(remaining, devices)
        device.add_blocks(segment, segment["blocks"])
    for number, history in enumerate(snapshot["device_traces"]):
        if history:
            device = devices.setdefault(number, kind())
            remaining -= _number(history)
            _require_bounded(remaining, devices)
            device.add_history(history)
    return devices


def _number(entries: list[Any]) -> int:
    return sum(len(entry) if type(entry) is Entries else 1 for entry in entries)


def _require_bounded(remaining: int, devices: Mapping[int, Any]) -> None:
    if remaining < 0:
        raise ValueError(f"it has more than {_MAX_ENTRIES:,} entries")
    if len(devices) > _MAX_DEVICES:
        raise ValueError(f"it has more than {_MAX_DEVICES} devices")


def _block(segment: dict[str, Any], block: dict[str, Any]) -> Block:
    private = segment.get("segment_pool_id", (0, 0))
    kind = segment.get("segment_type")
    kind = printable(kind) if isinstance(kind, str) else "unknown"
    address = whole_number(segment["address"], "an address", MAX_ADDRESS)
    size = whole_number(segment["total_size"], "a size")
    return Block(
        segment=f"segment {address:#x}, {format_bytes(size)}",
        pool=f"{kind} pool" if private == (0, 0) else f"private {kind} pool {_pool(private)}",
        address=whole_number(block.get("address", 0), "an address", MAX_ADDRESS),
        size=whole_number(block["size"], "a size"),
        state=block["state"] if block["state"] in STATES else "inactive",
        source=block,
    )


def _require_distinct(lists: Sequence[Any]) -> None:
    """Refuse a snapshot that uses one list in several places.

    Otherwise a small file could hold a huge number of entries.
    """
    if len({id(entries) for entries in lists}) < len(lists):
        raise ValueError("it uses one list in several places, which torch never writes")


def _pool(identity: Any) -> str:
    plain = isinstance(identity, tuple) and all(type(part) is int for part in identity[:2])
    return ".".join(str(part % (MAX_ADDRESS)) for part in identity[:2]) if plain else "unknown"


def _add_entry(device: DeviceSnapshot, entry: dict[str, Any]) -> None:
    """Add an entry to the device's history. Entries with an unknown action are ignored."""
    action = entry["action"]
    if action in ("alloc", "free_requested"):
        address = whole_number(entry["addr"], "an address", MAX_ADDRESS)
        size = whole_number(entry["size"], "a size")
        device.history.append(Change(address, size, action == "alloc", entry))
    elif action == "oom":
        device.failed.append(whole_number(entry["size"], "a size"))


def whole_number(value: Any, what: str, limit: int = MAX_SIZE) -> int:
    if type(value) is not int:
        # The message has only the type: the text of a list that contains one list many times can be enormous.
        raise ValueError(f"{what} is a {type(value).__name__}")
    if not 0 <= value < limit:
        raise ValueError(f"{what} is out of range")
    return value


def requested_size(requested: Any, size: int) -> int:
    """Return the bytes that the program requested for a block; if unknown, the bytes of the block.

    Requested bytes agree with the allocator's history, which also holds requested sizes.

    Args:
        requested: Requested bytes as the snapshot has them.
        size: Bytes of the block.
    """
    return requested if type(requested) is int and 0 < requested <= size else size


def printable(text: str, *, end: bool = False) -> str:
    """Cut a snapshot's text to `_MAX_TEXT` characters, and replace characters that can't be printed.

    If ``end`` is true, the end of the text is kept, otherwise the beginning.
    """
    cut = text[-_MAX_TEXT:] if end else text[:_MAX_TEXT]
    return "".join(character if character.isprintable() else "?" for character in cut)


_IN_USE, _ALLOC = "active_allocated", "alloc"
_CHANGES = (_ALLOC, "free_requested")


class Changes:
    """Allocations and frees, in order.

    Attributes:
        sizes: Bytes that the program requested.
        stacks: As in `Entries`; ``None`` if unknown.
    """

    def __init__(self) -> None:
        self.sizes = array("Q")
        self.stacks: list[Any] = []
        self._addresses = array("Q")
        self._allocs = bytearray()

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield the address, the bytes, and 1 for an allocation or 0 for a free."""
        return zip(self._addresses, self.sizes, self._allocs, strict=True)

    def add(self, address: int, size: int, is_alloc: bool, stack: Any) -> None:
        self._addresses.append(address)
        self.sizes.append(size)
        self._allocs.append(is_alloc)
        self.stacks.append(stack)

    def extend(
        self,
        addresses: Iterable[int],
        sizes: Iterable[int],
        allocs: Iterable[int],
        stacks: Iterable[Any],
    ) -> None:
        self._addresses.extend(addresses)
        self.sizes.extend(sizes)
        self._allocs.extend(allocs)
        self.stacks.extend(stacks)

    def columns(self) -> tuple[Iterable[int], Iterable[int], Iterable[int], Iterable[Any]]:
        """Return the arguments with which `extend` adds these changes."""
        return self._addresses, self.sizes, self._allocs, self.stacks


class _Device:
    """Blocks in use on a device, as allocations, and the device's history."""

    def __init__(self) -> None:
        self.blocks = Changes()
        self.history = Changes()

    def add_blocks(self, _segment: dict[str, Any], blocks: list[Any]) -> None:
        for entry in blocks:
            if type(entry) is Entries:
                sizes = map(requested_size, entry.requested, _checked(entry.sizes))
                kept = [kind == _IN_USE for kind in entry.kinds]
                self._add(self.blocks, entry, sizes, kept)
            else:
                address = whole_number(entry.get("address", 0), "an address", MAX_ADDRESS)
                size = whole_number(entry["size"], "a size")
                if entry["state"] == _IN_USE:
                    requested = requested_size(entry.get("requested_size"), size)
                    self.blocks.add(address, requested, True, entry.get("frames"))

    def add_history(self, history: list[Any]) -> None:
        for entry in history:
            if type(entry) is Entries:
                kept = [kind in _CHANGES for kind in entry.kinds]
                self._add(self.history, entry, _checked(entry.sizes), kept)
            elif entry["action"] in _CHANGES:
                address = whole_number(entry["addr"], "an address", MAX_ADDRESS)
                size = whole_number(entry["size"], "a size")
                self.history.add(address, size, entry["action"] == _ALLOC, entry.get("frames"))

    def _add(self, to: Changes, entries: Entries, sizes: Iterable[int], kept: list[bool]) -> None:
        to.extend(
            compress(entries.addresses, kept),
            compress(sizes, kept),
            [kind in (_ALLOC, _IN_USE) for kind in compress(entries.kinds, kept)],
            compress(entries.stacks, kept),
        )

    def changes(self) -> Changes:
        changes, first = Changes(), first_changes(self.history)
        for address, freed in first.items():
            if freed is not None:
                changes.add(address, freed, True, None)
        kept = [address not in first for address, _, _ in self.blocks]
        changes.extend(*(compress(column, kept) for column in self.blocks.columns()))
        changes.extend(*self.history.columns())
        return changes


def read_changes(snapshot: Mapping[str, Any], name: str) -> dict[int, Changes]:
    """Return the changes of each device that has any, by device number.

    First comes an allocation for each block that was live when the history began, then the history.

    Args:
        snapshot: A snapshot. Its lists of blocks and of changes can contain `Entries`.
        name: Name of the snapshot in errors.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes, or is too large.
    """
    devices = read_as(_Device, snapshot, name)
    return {number: changes for number, device in devices.items() if (changes := device.changes())}


def _checked(sizes: array[int]) -> array[int]:
    if max(sizes) >= MAX_SIZE:
        raise ValueError("a size is out of range")
    return sizes


_MAX_SAMPLES = 200_000
"""Maximum number of samples in the whole file. Speedscope loads such a file in about three seconds."""
_PROFILES_PER_DEVICE = 4
_MAX_FRAMES = 200

_BEFORE = "(allocated before the history begins)"
_NO_FILE = ("", "??", "memlog")
"""File names that mean "no file". memlog's own export writes "memlog", because its frames are layers."""


class SnapshotGraph(NamedTuple):
    """A speedscope document, and notes for the user about data that is missing in the snapshot."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def snapshot_graph(snapshot: dict[str, Any], name: str) -> SnapshotGraph:
    """Build a snapshot's flame graphs: live bytes, live bytes at the peak, reserved bytes, all allocations.

    Live bytes are grouped by the stack that allocated them. If the stack is unknown, bytes are grouped by the
    allocator's note (``user_metadata``). If there is no note either, bytes are grouped by the blocks' sizes.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes, or holds no allocation.
    """
    devices = read_devices(snapshot, name)
    if not devices:
        raise SnapshotError(
            f"{name} holds no allocation, so there is nothing to show: write it while tensors are live"
        )
    frames, stacks = Frames(), _Stacks()
    max_samples = _MAX_SAMPLES // (_PROFILES_PER_DEVICE * len(devices))
    profiles = [
        sampled(title, weighted, frames, max_samples)
        for number, device in devices.items()
        for title, weighted in _profiles(f"device {number}", device, stacks)
    ]
    return SnapshotGraph(speedscope_file(name, frames, profiles), tuple(_notes(devices, stacks)))


class _Stacks:
    """Lookup of an allocation's stack, the outermost frame first.

    Attributes:
        has_frames: True if any entry so far had frames.
    """

    def __init__(self) -> None:
        self.has_frames = False
        # Stacks by the id() of the list of frames: entries of a snapshot share most of these lists. An id()
        # stays valid because the snapshot lives longer than this object.
        self._known: dict[int, Stack] = {}

    def of(self, *sources: dict[str, Any] | None, size: int) -> Stack:
        """Return the stack from the first source that has frames.

        If no source has frames, the stack shows the first note found. Without a note, it shows the size.
        """
        for source in sources:
            stack = None if source is None else self._frames(source.get("frames"))
            if stack:
                self.has_frames = True
                return stack
        for source in sources:
            note = None if source is None else source.get("user_metadata")
            if isinstance(note, str) and note:
                return ("(no frames)", f"note {printable(note)}")
        return ("(no frames)", _size_class(size))

    def _frames(self, frames: Any) -> Stack:
        if not isinstance(frames, list):
            return ()
        stack = self._known.get(id(frames))
        if stack is None:
            inner = [_frame(frame) for frame in frames[:_MAX_FRAMES]]
            outer = ["(outer frames left out)"] if len(frames) > _MAX_FRAMES else []
            stack = self._known[id(frames)] = (*outer, *reversed(inner))
        return stack


def _frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return "(unknown)"
    name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
    text = printable(name) if isinstance(name, str) and name else "(unknown)"
    if not isinstance(file, str) or file in _NO_FILE:
        return text
    return f"{text} ({printable(file, end=True)}:{line if type(line) is int else '?'})"


def _size_class(size: int) -> str:
    low = 1
    while low * 16 <= size:
        low *= 16
    return f"blocks of {format_bytes(low)} to {format_bytes(low * 16)}"


def _profiles(
    name: str, device: DeviceSnapshot, stacks: _Stacks
) -> Iterator[tuple[str, Iterable[tuple[Stack, int]]]]:
    yield f"Live bytes, {name}", _live(device, stacks)
    yield f"Live bytes at the peak of the history, {name}", _at_peak(device, stacks)
    yield f"Reserved bytes by segment, {name}", _reserved(device)
    yield (
        f"Bytes allocated, in order, {name}",
        (
            (stacks.of(change.source, size=change.size), change.size)
            for change in device.history
            if change.is_alloc and change.size
        ),
    )


def _live(device: DeviceSnapshot, stacks: _Stacks) -> Iterator[tuple[Stack, int]]:
    newest = {change.address: change.source for change in device.history if change.is_alloc}
    sizes: Counter[Stack] = Counter()
    for block in device.blocks:
        if block.state != "inactive":
            stack = stacks.of(block.source, newest.get(block.address), size=block.size)
            leaf = () if block.state == "active_allocated" else (STATES[block.state],)
            sizes[stack + leaf] += block.size
    yield from _largest(sizes)


def _reserved(device: DeviceSnapshot) -> Iterator[tuple[Stack, int]]:
    for block in device.blocks:
        if block.size:
            yield (block.pool, block.segment, STATES[block.state]), block.size


def _at_peak(device: DeviceSnapshot, stacks: _Stacks) -> Iterator[tuple[Stack, int]]:
    if not device.history:
        return
    live = device.before()
    for change in device.history[: _peak(device)]:
        if change.is_alloc:
            live[change.address] = (change.source, change.size)
        else:
            live.pop(change.address, None)
    sizes: Counter[Stack] = Counter()
    for source, size in live.values():
        sizes[(_BEFORE,) if source is None else stacks.of(source, size=size)] += size
    yield from _largest(sizes)


def _peak(device: DeviceSnapshot) -> int:
    """Return the number of changes in the history up to the peak of live bytes."""
    live = {address: size for address, (_, size) in device.before().items()}
    level = highest = sum(live.values())
    peak = 0
    for number, change in enumerate(device.history, 1):
        # The history can lack the free before an allocation at the same address.
        level -= live.pop(change.address, 0)
        if change.is_alloc:
            live[change.address] = change.size
            level += change.size
        if level > highest:
            highest, peak = level, number
    return peak


def _largest(sizes: Counter[Stack]) -> Iterator[tuple[Stack, int]]:
    return ((stack, size) for stack, size in sizes.most_common() if size)


def _notes(devices: dict[int, DeviceSnapshot], stacks: _Stacks) -> Iterator[str]:
    if not stacks.has_frames:
        yield (
            "no stack was recorded, so bytes are grouped by the allocator's notes or by size: call "
            "torch.cuda.memory._record_memory_history() before training"
        )
    for number, device in devices.items():
        unknown = sum(source is None for source, _ in device.before().values())
        if unknown:
            yield f"device {number}: {unknown:,} blocks were allocated before its history begins"
        if device.failed:
            wanted = format_bytes(device.failed[-1])
            yield f"device {number}: {len(device.failed):,} allocations failed, the last for {wanted}"
