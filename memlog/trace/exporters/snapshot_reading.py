"""Reading of an allocator's snapshot.

A snapshot is untrusted input: it can hold plain types in any shape. A snapshot is refused if it does not have
the form that torch writes, or if it has too many entries or devices.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from memlog._internal.terminal import format_bytes
from memlog.errors import SnapshotError

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


class _Device(Protocol):
    def add_blocks(self, segment: dict[str, Any], blocks: list[Any]) -> None: ...

    def add_history(self, history: list[Any]) -> None: ...


_D = TypeVar("_D", bound=_Device)


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
        first = first_changes((each.address, each.size, each.is_alloc) for each in self.history)
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
