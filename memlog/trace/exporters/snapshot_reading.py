"""Reading of an allocator's snapshot.

A snapshot is untrusted input: it can hold plain types in any shape. A snapshot is refused if it does not have
the form that torch writes, or if it has too many entries or devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memlog._internal.units import format_bytes
from memlog.errors import SnapshotError

_MAX_DEVICES = 16
_MAX_ENTRIES = 5_000_000
_MAX_TEXT = 200
_MAX_SIZE = 1 << 50

STATES = {
    "active_allocated": "[allocated]",
    "active_pending_free": "[freed, waiting for another stream]",
    "inactive": "[unused]",
}


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

    def before(self) -> dict[int, tuple[dict[str, Any] | None, int]]:
        """Return the blocks that were live when the history began, by address.

        Each value is a pair of the block's entry in the snapshot (``None`` if unknown) and the block's bytes.
        """
        first: dict[int, Change] = {}
        for change in self.history:
            first.setdefault(change.address, change)
        live: dict[int, tuple[dict[str, Any] | None, int]] = {
            change.address: (None, change.size) for change in first.values() if not change.is_alloc
        }
        for block in self.blocks:
            if block.state == "active_allocated" and block.address not in first:
                live[block.address] = (block.source, _requested_size(block))
        return live


def read_devices(snapshot: Mapping[str, Any], name: str) -> dict[int, DeviceSnapshot]:
    """Return each device that has blocks or a history in a snapshot, by device number.

    Raises:
        SnapshotError: The snapshot does not have the form that torch writes, or is too large.
    """
    try:
        return _devices(snapshot)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SnapshotError(
            f"{name} is damaged ({printable(str(error))}): write it again with _dump_snapshot()"
        ) from None


def _devices(snapshot: Mapping[str, Any]) -> dict[int, DeviceSnapshot]:
    devices: dict[int, DeviceSnapshot] = {}
    remaining = _MAX_ENTRIES
    _require_distinct([segment["blocks"] for segment in snapshot["segments"] if segment["blocks"]])
    _require_distinct([history for history in snapshot["device_traces"] if history])
    for segment in snapshot["segments"]:
        number = _whole_number(segment.get("device", 0), "a device's number")
        device = devices.setdefault(number, DeviceSnapshot())
        remaining -= len(segment["blocks"]) + 1
        _require_bounded(remaining, devices)
        device.blocks += [_block(segment, block) for block in segment["blocks"]]
    for number, history in enumerate(snapshot["device_traces"]):
        if history:
            device = devices.setdefault(number, DeviceSnapshot())
            remaining -= len(history)
            _require_bounded(remaining, devices)
            for entry in history:
                _add_entry(device, entry)
    return {
        number: device
        for number, device in sorted(devices.items())
        if device.blocks or device.history
    }


def _require_bounded(remaining: int, devices: dict[int, DeviceSnapshot]) -> None:
    if remaining < 0:
        raise ValueError(f"it has more than {_MAX_ENTRIES:,} entries")
    if len(devices) > _MAX_DEVICES:
        raise ValueError(f"it has more than {_MAX_DEVICES} devices")


def _block(segment: dict[str, Any], block: dict[str, Any]) -> Block:
    private = segment.get("segment_pool_id", (0, 0))
    kind = segment.get("segment_type")
    kind = printable(kind) if isinstance(kind, str) else "unknown"
    address = _whole_number(segment["address"], "an address", 1 << 64)
    size = _whole_number(segment["total_size"], "a size")
    return Block(
        segment=f"segment {address:#x}, {format_bytes(size)}",
        pool=f"{kind} pool" if private == (0, 0) else f"private {kind} pool {_pool(private)}",
        address=_whole_number(block.get("address", 0), "an address", 1 << 64),
        size=_whole_number(block["size"], "a size"),
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
    return ".".join(str(part % (1 << 64)) for part in identity[:2]) if plain else "unknown"


def _add_entry(device: DeviceSnapshot, entry: dict[str, Any]) -> None:
    """Add an entry to the device's history. Entries with an unknown action are ignored."""
    action = entry["action"]
    if action in ("alloc", "free_requested"):
        address = _whole_number(entry["addr"], "an address", 1 << 64)
        size = _whole_number(entry["size"], "a size")
        device.history.append(Change(address, size, action == "alloc", entry))
    elif action == "oom":
        device.failed.append(_whole_number(entry["size"], "a size"))


def _whole_number(value: Any, what: str, limit: int = _MAX_SIZE) -> int:
    if type(value) is not int:
        # The message has only the type: the text of a list that contains one list many times can be enormous.
        raise ValueError(f"{what} is a {type(value).__name__}")
    if not 0 <= value < limit:
        raise ValueError(f"{what} is out of range")
    return value


def _requested_size(block: Block) -> int:
    """Return the bytes that the program requested for a block; if unknown, the bytes of the block.

    Requested bytes agree with the allocator's history, which also holds requested sizes.
    """
    requested = block.source.get("requested_size")
    return requested if type(requested) is int and 0 < requested <= block.size else block.size


def printable(text: str, *, end: bool = False) -> str:
    """Cut a snapshot's text to `_MAX_TEXT` characters, and replace characters that can't be printed.

    If ``end`` is true, the end of the text is kept, otherwise the beginning.
    """
    cut = text[-_MAX_TEXT:] if end else text[:_MAX_TEXT]
    return "".join(character if character.isprintable() else "?" for character in cut)
