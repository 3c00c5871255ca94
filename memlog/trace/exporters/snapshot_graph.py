"""Export of an allocator's snapshot as flame graphs of memory by stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memlog._internal.terminal import format_bytes
from memlog.errors import SnapshotError
from memlog.trace.exporters.snapshot_reading import STATES, DeviceSnapshot, printable, read_devices
from memlog.trace.exporters.speedscope import Frames, Stack, sampled, speedscope_file

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
