"""An allocator's snapshot as a flame graph: who holds the device's memory now, and who did at the peak.

A snapshot that was downloaded may hold anything of plain types, in any shape: what is not as torch writes
it is refused, and work and text are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from memlog._internal.units import format_bytes
from memlog.errors import SnapshotError
from memlog.trace.exporters.speedscope_format import Frames, sampled, speedscope_file
from memlog.trace.exporters.stacks import Stack

_SAMPLES_AT_MOST = 200_000
"""In the whole file, which the page loads in some three seconds."""
_PROFILES_A_DEVICE = 4
_DEVICES_AT_MOST = 16
_ENTRIES_AT_MOST = 5_000_000
_FRAMES_AT_MOST = 200
_TEXT_AT_MOST = 200
_LARGEST = 1 << 50

_BEFORE = "(allocated before the history begins)"
_STATES = {
    "active_allocated": "[allocated]",
    "active_pending_free": "[freed, waiting for another stream]",
    "inactive": "[unused]",
}
_NO_FILE = ("", "??", "memlog")
"""What stands for a file where there is none; memlog's own export has layers for frames."""


class SnapshotGraph(NamedTuple):
    """A speedscope document, and what is odd about the snapshot, for the user."""

    document: dict[str, Any]
    notes: tuple[str, ...]


def snapshot_graph(snapshot: dict[str, Any], name: str) -> SnapshotGraph:
    """The flame graphs of a snapshot: live and reserved bytes now, and what its history tells.

    Live bytes stand below the stack that allocated them; where none was recorded, below the allocator's note
    (``user_metadata``) or, failing that, the blocks' size.

    Args:
        snapshot: What `memlog.artifacts.snapshots.read_snapshot` gives.
        name: What it is called in errors.

    Raises:
        SnapshotError: It is not as torch writes it, or nothing was allocated.
    """
    try:
        devices = _devices(snapshot)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SnapshotError(
            f"{name} is damaged ({_short(str(error))}): write it again with _dump_snapshot()"
        ) from None
    if not devices:
        raise SnapshotError(f"{name} holds no allocation: there is nothing to show")
    frames, stacks = Frames(), _Stacks()
    room = _SAMPLES_AT_MOST // (_PROFILES_A_DEVICE * len(devices))
    profiles = [
        sampled(title, weighted, frames, room)
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
    born: bool
    source: dict[str, Any]


class _Device:
    """What a snapshot tells of one device."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.history: list[_Change] = []
        self.failed: list[int] = []

    def newest(self) -> dict[int, dict[str, Any]]:
        """The entry of the newest allocation at each address."""
        return {change.address: change.source for change in self.history if change.born}

    def before(self) -> dict[int, tuple[dict[str, Any] | None, int]]:
        """What was there when the history begins, by address: what is known of it, and bytes."""
        first: dict[int, _Change] = {}
        for change in self.history:
            first.setdefault(change.address, change)
        there: dict[int, tuple[dict[str, Any] | None, int]] = {
            change.address: (None, change.size) for change in first.values() if not change.born
        }
        for block in self.blocks:
            if block.state == "active_allocated" and block.address not in first:
                there[block.address] = (block.source, _asked_for(block))
        return there


def _devices(snapshot: dict[str, Any]) -> dict[int, _Device]:
    """By number; those alone that have blocks or a history."""
    devices: dict[int, _Device] = {}
    room = _ENTRIES_AT_MOST
    _require_own([segment["blocks"] for segment in snapshot["segments"] if segment["blocks"]])
    _require_own([history for history in snapshot["device_traces"] if history])
    for segment in snapshot["segments"]:
        number = _whole(segment.get("device", 0), "a device's number")
        device = devices.setdefault(number, _Device())
        room -= len(segment["blocks"]) + 1
        _require_room(room, devices)
        device.blocks += [_block(segment, block) for block in segment["blocks"]]
    for number, history in enumerate(snapshot["device_traces"]):
        if history:
            device = devices.setdefault(number, _Device())
            room -= len(history)
            _require_room(room, devices)
            for entry in history:
                _read(entry, device)
    return {
        number: device
        for number, device in sorted(devices.items())
        if device.blocks or device.history
    }


def _require_room(room: int, devices: dict[int, _Device]) -> None:
    if room < 0:
        raise ValueError(f"it has more than {_ENTRIES_AT_MOST:,} entries")
    if len(devices) > _DEVICES_AT_MOST:
        raise ValueError(f"it has more than {_DEVICES_AT_MOST} devices")


def _block(segment: dict[str, Any], block: dict[str, Any]) -> _Block:
    state = block["state"]
    if state not in _STATES:
        # Older versions say so of a block that is freed and awaits other streams.
        state = "active_pending_free" if state == "active_awaiting_free" else "inactive"
    private = segment.get("segment_pool_id", (0, 0))
    kind = segment.get("segment_type")
    kind = _short(kind) if isinstance(kind, str) else "unknown"
    address = _whole(segment["address"], "an address", 1 << 64)
    size = _whole(segment["total_size"], "a size")
    return _Block(
        segment=f"segment {address:#x}, {format_bytes(size)}",
        pool=f"{kind} pool" if private == (0, 0) else f"private {kind} pool {_pool(private)}",
        address=_whole(block.get("address", 0), "an address", 1 << 64),
        size=_whole(block["size"], "a size"),
        state=state,
        source=block,
    )


def _require_own(lists: Sequence[Any]) -> None:
    """A small file in which many share one long list would come to any number of entries."""
    if len({id(entries) for entries in lists}) < len(lists):
        raise ValueError("several of its parts are one list, which torch does not write")


def _pool(identity: Any) -> str:
    plain = isinstance(identity, tuple) and all(type(part) is int for part in identity[:2])
    return ".".join(str(part % (1 << 64)) for part in identity[:2]) if plain else "unknown"


def _read(entry: dict[str, Any], device: _Device) -> None:
    """Actions that are not known are passed over."""
    action = entry["action"]
    if action in ("alloc", "free_requested"):
        address = _whole(entry["addr"], "an address", 1 << 64)
        size = _whole(entry["size"], "a size")
        device.history.append(_Change(address, size, action == "alloc", entry))
    elif action == "oom":
        device.failed.append(_whole(entry["size"], "a size"))


def _whole(value: Any, what: str, limit: int = _LARGEST) -> int:
    if type(value) is not int:
        # Not its text: that of lists which share lists may be endless.
        raise ValueError(f"{what} is a {type(value).__name__}")
    if not 0 <= value < limit:
        raise ValueError(f"{what} is absurd")
    return value


def _asked_for(block: _Block) -> int:
    """As the history counts: before the allocator rounds it up."""
    asked = block.source.get("requested_size")
    return asked if type(asked) is int and 0 < asked <= block.size else block.size


class _Stacks:
    """What allocated: frames, outermost first; else the allocator's note; else the size.

    Attributes:
        framed: Whether any entry had frames.
    """

    def __init__(self) -> None:
        self.framed = False
        # A snapshot shares most of its lists of frames; it outlives this.
        self._known: dict[int, Stack] = {}

    def of(self, *sources: dict[str, Any] | None, size: int) -> Stack:
        """By the first source that tells."""
        for source in sources:
            stack = None if source is None else self._frames(source.get("frames"))
            if stack:
                self.framed = True
                return stack
        for source in sources:
            note = None if source is None else source.get("user_metadata")
            if isinstance(note, str) and note:
                return ("(no frames)", f"note {_short(note)}")
        return ("(no frames)", _size_class(size))

    def _frames(self, frames: Any) -> Stack:
        if not isinstance(frames, list):
            return ()
        stack = self._known.get(id(frames))
        if stack is None:
            inner = [_frame(frame) for frame in frames[:_FRAMES_AT_MOST]]
            outer = ["(outer frames left out)"] if len(frames) > _FRAMES_AT_MOST else []
            stack = self._known[id(frames)] = (*outer, *reversed(inner))
        return stack


def _frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return "(unknown)"
    name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
    text = _short(name) if isinstance(name, str) and name else "(unknown)"
    if not isinstance(file, str) or file in _NO_FILE:
        return text
    return f"{text} ({_short(file, end=True)}:{line if type(line) is int else '?'})"


def _short(text: str, *, end: bool = False) -> str:
    """A snapshot's own words may be long, and steer a terminal."""
    cut = text[-_TEXT_AT_MOST:] if end else text[:_TEXT_AT_MOST]
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
            if change.born and change.size
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
    """Replays the history twice: to find the peak, and up to it."""
    if not device.history:
        return
    peak = _peak(device)
    live = device.before()
    for change in device.history[:peak]:
        if change.born:
            live[change.address] = (change.source, change.size)
        else:
            live.pop(change.address, None)
    sizes: Counter[Stack] = Counter()
    for source, size in live.values():
        sizes[(_BEFORE,) if source is None else stacks.of(source, size=size)] += size
    yield from _largest(sizes)


def _peak(device: _Device) -> int:
    """So many changes of the history lead to its peak."""
    live = {address: size for address, (_, size) in device.before().items()}
    level = best = sum(live.values())
    found = 0
    for number, change in enumerate(device.history, 1):
        level -= live.pop(change.address, 0)
        if change.born:
            live[change.address] = change.size
            level += change.size
        if level > best:
            best, found = level, number
    return found


def _largest(sizes: Counter[Stack]) -> Iterator[tuple[Stack, int]]:
    return ((stack, size) for stack, size in sizes.most_common() if size)


def _notes(devices: dict[int, _Device], stacks: _Stacks) -> Iterator[str]:
    if not stacks.framed:
        yield (
            "no stack was recorded, so bytes stand by the allocator's notes or by size: call "
            "torch.cuda.memory._record_memory_history() before training"
        )
    for number, device in devices.items():
        unknown = sum(source is None for source, _ in device.before().values())
        if unknown:
            yield f"device {number}: {unknown:,} blocks were allocated before its history begins"
        if device.failed:
            wanted = format_bytes(device.failed[-1])
            yield f"device {number}: {len(device.failed):,} allocations failed, the last for {wanted}"
