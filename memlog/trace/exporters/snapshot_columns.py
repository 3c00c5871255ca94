"""Columns of a snapshot's blocks and changes, for drawings of hundreds of thousands of them.

A dictionary or a tuple for each of them would take five to thirty times as much memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

from memlog.trace.exporters.snapshot_reading import (
    MAX_ADDRESS,
    MAX_SIZE,
    Entries,
    first_changes,
    read_as,
    requested_size,
    whole_number,
)

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
        found, first = Changes(), first_changes(self.history)
        for address, freed in first.items():
            if freed is not None:
                found.add(address, freed, True, None)
        kept = [address not in first for address, _, _ in self.blocks]
        found.extend(*(compress(column, kept) for column in self.blocks.columns()))
        found.extend(*self.history.columns())
        return found


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
    return {number: found for number, device in devices.items() if (found := device.changes())}


def _checked(sizes: array[int]) -> array[int]:
    if max(sizes) >= MAX_SIZE:
        raise ValueError("a size is out of range")
    return sizes
