"""Export of an allocator's snapshot as flame graphs: the stacks that hold memory now, and at the peak.

A downloaded snapshot is untrusted input: it may hold plain types in any shape. A snapshot of another form
than torch writes is refused, and work and text lengths are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memlog._internal.units import format_bytes
from memlog.errors import SnapshotError
from memlog.trace.exporters.speedscope_format import Frames, sampled, speedscope_file
from memlog.trace.exporters.stacks import Stack

_MAX_SAMPLES = 200_000
"""Largest number of samples in the whole file. The page loads such a file in about three seconds."""
_PROFILES_PER_DEVICE = 4
_MAX_DEVICES = 16
_MAX_ENTRIES = 5_000_000
_MAX_FRAMES = 200
_MAX_TEXT = 200
_MAX_SIZE = 1 << 50

_BEFORE = "(allocated before the history begins)"
_STATES = {
    "active_allocated": "[allocated]",
    "active_pending_free": "[freed, waiting for another stream]",
    "inactive": "[unused]",
}
_NO_FILE = ("", "??", "memlog")
"""File names that mean "no file"; in memlog's own export, layers are the frames."""


class SnapshotGraph(NamedTuple):
    """A speedscope document, and notes for the user about what the snapshot lacks."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def snapshot_graph(snapshot: dict[str, Any], name: str) -> SnapshotGraph:
    """Build a snapshot's flame graphs: live and reserved bytes now, and bytes of its history.

    Live bytes are shown below the stack that allocated them. If no stack was recorded, they are shown below
    the allocator's note (``user_metadata``); without a note, below the blocks' size.

    Raises:
        SnapshotError: The snapshot has another form than torch writes, or holds no allocation.
    """
    try:
        devices = _devices(snapshot)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SnapshotError(
            f"{name} is damaged ({_printable(str(error))}): write it again with _dump_snapshot()"
        ) from None
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


class _Block(NamedTuple):
    segment: str
    pool: str
    address: int
    size: int
    state: str
    source: dict[str, Any]


class _Change(NamedTuple):
    address: int
    size: int
    is_alloc: bool
    source: dict[str, Any]


class _Device:
    """Blocks and history of one device."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.history: list[_Change] = []
        self.failed: list[int] = []

    def newest(self) -> dict[int, dict[str, Any]]:
        """Return the entry of the newest allocation at each address."""
        return {change.address: change.source for change in self.history if change.is_alloc}

    def before(self) -> dict[int, tuple[dict[str, Any] | None, int]]:
        """Return entry (if known) and bytes of blocks live when the history began, by address."""
        first: dict[int, _Change] = {}
        for change in self.history:
            first.setdefault(change.address, change)
        live: dict[int, tuple[dict[str, Any] | None, int]] = {
            change.address: (None, change.size) for change in first.values() if not change.is_alloc
        }
        for block in self.blocks:
            if block.state == "active_allocated" and block.address not in first:
                live[block.address] = (block.source, _requested_size(block))
        return live


def _devices(snapshot: dict[str, Any]) -> dict[int, _Device]:
    """Return the devices that have blocks or a history, by number."""
    devices: dict[int, _Device] = {}
    remaining = _MAX_ENTRIES
    _require_distinct([segment["blocks"] for segment in snapshot["segments"] if segment["blocks"]])
    _require_distinct([history for history in snapshot["device_traces"] if history])
    for segment in snapshot["segments"]:
        number = _whole_number(segment.get("device", 0), "a device's number")
        device = devices.setdefault(number, _Device())
        remaining -= len(segment["blocks"]) + 1
        _require_bounded(remaining, devices)
        device.blocks += [_block(segment, block) for block in segment["blocks"]]
    for number, history in enumerate(snapshot["device_traces"]):
        if history:
            device = devices.setdefault(number, _Device())
            remaining -= len(history)
            _require_bounded(remaining, devices)
            for entry in history:
                _add_entry(device, entry)
    return {
        number: device
        for number, device in sorted(devices.items())
        if device.blocks or device.history
    }


def _require_bounded(remaining: int, devices: dict[int, _Device]) -> None:
    if remaining < 0:
        raise ValueError(f"it has more than {_MAX_ENTRIES:,} entries")
    if len(devices) > _MAX_DEVICES:
        raise ValueError(f"it has more than {_MAX_DEVICES} devices")


def _block(segment: dict[str, Any], block: dict[str, Any]) -> _Block:
    state = block["state"]
    if state not in _STATES:
        # torch's documentation has this name for a freed block that waits for another stream.
        state = "active_pending_free" if state == "active_awaiting_free" else "inactive"
    private = segment.get("segment_pool_id", (0, 0))
    kind = segment.get("segment_type")
    kind = _printable(kind) if isinstance(kind, str) else "unknown"
    address = _whole_number(segment["address"], "an address", 1 << 64)
    size = _whole_number(segment["total_size"], "a size")
    return _Block(
        segment=f"segment {address:#x}, {format_bytes(size)}",
        pool=f"{kind} pool" if private == (0, 0) else f"private {kind} pool {_pool(private)}",
        address=_whole_number(block.get("address", 0), "an address", 1 << 64),
        size=_whole_number(block["size"], "a size"),
        state=state,
        source=block,
    )


def _require_distinct(lists: Sequence[Any]) -> None:
    """Refuse lists that are one object: a small file that shares a list can have countless entries."""
    if len({id(entries) for entries in lists}) < len(lists):
        raise ValueError("several of its parts are one list, which torch does not write")


def _pool(identity: Any) -> str:
    plain = isinstance(identity, tuple) and all(type(part) is int for part in identity[:2])
    return ".".join(str(part % (1 << 64)) for part in identity[:2]) if plain else "unknown"


def _add_entry(device: _Device, entry: dict[str, Any]) -> None:
    """Add an entry to the device's history; entries with an unknown action are ignored."""
    action = entry["action"]
    if action in ("alloc", "free_requested"):
        address = _whole_number(entry["addr"], "an address", 1 << 64)
        size = _whole_number(entry["size"], "a size")
        device.history.append(_Change(address, size, action == "alloc", entry))
    elif action == "oom":
        device.failed.append(_whole_number(entry["size"], "a size"))


def _whole_number(value: Any, what: str, limit: int = _MAX_SIZE) -> int:
    if type(value) is not int:
        # The message names the type only: the text of lists that share lists can be endless.
        raise ValueError(f"{what} is a {type(value).__name__}")
    if not 0 <= value < limit:
        raise ValueError(f"{what} is out of range")
    return value


def _requested_size(block: _Block) -> int:
    """Return a block's size before the allocator rounded it up, as the history counts it."""
    requested = block.source.get("requested_size")
    return requested if type(requested) is int and 0 < requested <= block.size else block.size


class _Stacks:
    """Lookup of an allocation's stack: its frames, outermost first, or the allocator's note, or the size.

    Attributes:
        has_frames: True if any entry had frames.
    """

    def __init__(self) -> None:
        self.has_frames = False
        # The key is id(): a snapshot shares most of its lists of frames, and lives longer than this object.
        self._known: dict[int, Stack] = {}

    def of(self, *sources: dict[str, Any] | None, size: int) -> Stack:
        """Return the stack of the first source that has one."""
        for source in sources:
            stack = None if source is None else self._frames(source.get("frames"))
            if stack:
                self.has_frames = True
                return stack
        for source in sources:
            note = None if source is None else source.get("user_metadata")
            if isinstance(note, str) and note:
                return ("(no frames)", f"note {_printable(note)}")
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
    text = _printable(name) if isinstance(name, str) and name else "(unknown)"
    if not isinstance(file, str) or file in _NO_FILE:
        return text
    return f"{text} ({_printable(file, end=True)}:{line if type(line) is int else '?'})"


def _printable(text: str, *, end: bool = False) -> str:
    """Shorten a snapshot's text, to its end if ``end``, and replace control characters."""
    cut = text[-_MAX_TEXT:] if end else text[:_MAX_TEXT]
    return "".join(character if character.isprintable() else "?" for character in cut)


def _size_class(size: int) -> str:
    low = 1
    while low * 16 <= size:
        low *= 16
    return f"blocks of {format_bytes(low)} to {format_bytes(low * 16)}"


def _profiles(
    name: str, device: _Device, stacks: _Stacks
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


def _live(device: _Device, stacks: _Stacks) -> Iterator[tuple[Stack, int]]:
    newest = device.newest()
    sizes: Counter[Stack] = Counter()
    for block in device.blocks:
        if block.state != "inactive":
            stack = stacks.of(block.source, newest.get(block.address), size=block.size)
            leaf = () if block.state == "active_allocated" else (_STATES[block.state],)
            sizes[stack + leaf] += block.size
    yield from _largest(sizes)


def _reserved(device: _Device) -> Iterator[tuple[Stack, int]]:
    for block in device.blocks:
        if block.size:
            yield (block.pool, block.segment, _STATES[block.state]), block.size


def _at_peak(device: _Device, stacks: _Stacks) -> Iterator[tuple[Stack, int]]:
    """Find the history's peak, then replay the history up to it."""
    if not device.history:
        return
    peak = _peak(device)
    live = device.before()
    for change in device.history[:peak]:
        if change.is_alloc:
            live[change.address] = (change.source, change.size)
        else:
            live.pop(change.address, None)
    sizes: Counter[Stack] = Counter()
    for source, size in live.values():
        sizes[(_BEFORE,) if source is None else stacks.of(source, size=size)] += size
    yield from _largest(sizes)


def _peak(device: _Device) -> int:
    """Return the number of changes that lead to the history's peak."""
    live = {address: size for address, (_, size) in device.before().items()}
    level = highest = sum(live.values())
    peak = 0
    for number, change in enumerate(device.history, 1):
        level -= live.pop(change.address, 0)
        if change.is_alloc:
            live[change.address] = change.size
            level += change.size
        if level > highest:
            highest, peak = level, number
    return peak


def _largest(sizes: Counter[Stack]) -> Iterator[tuple[Stack, int]]:
    return ((stack, size) for stack, size in sizes.most_common() if size)


def _notes(devices: dict[int, _Device], stacks: _Stacks) -> Iterator[str]:
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
