"""Allocator history of a device."""

from __future__ import annotations

import inspect
from typing import Any

import torch

MAX_ENTRIES = 131_072
"""Maximum number of entries in each device's history (136 bytes each). Beyond the maximum, new entries
replace the oldest ones. torch's default has no limit."""


class AllocatorHistory:
    """History of the allocator of one CUDA or XPU device.

    If the user's program has turned the history on, memlog neither turns it off nor clears it. memlog
    attaches notes to the entries, and reads only the entries of the window.

    ``device``: Device with an index, such as ``cuda:0``.

    Attributes:
        takes_notes: True if this torch can attach notes to entries.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: Any = getattr(torch, device.type).memory
        self._set_note = getattr(self._memory, "_set_memory_metadata", None)
        self._enabled_here = False
        self.takes_notes = self._set_note is not None

    def refusal(self) -> str | None:
        """Return why the history can't be used now; ``None`` if it can."""
        kind = self.device.type
        module: Any = getattr(torch, kind)
        for needed in ("_record_memory_history", "_snapshot"):
            if not hasattr(self._memory, needed):
                return f"torch {torch.__version__} has no torch.{kind}.memory.{needed}"
        if not module.is_initialized():
            return f"{kind} is not initialised yet"
        backend = getattr(self._memory, "get_allocator_backend", None)
        if backend is not None and backend() != "native":
            return f"the allocator is {backend()}, which keeps no history"
        get_note = getattr(self._memory, "_get_memory_metadata", None)
        if get_note is not None and get_note():
            return "the program attaches memory metadata of its own"
        return None

    def start(self) -> None:
        """Turn the history on if it is off."""
        is_on = getattr(torch._C, f"_{self.device.type}_isHistoryEnabled", None)
        if is_on is not None and is_on():
            return
        wanted = {
            "context": None,
            "stacks": "python",
            "max_entries": MAX_ENTRIES,
            "clear_history": True,
            "skip_actions": ["free_completed"],
        }
        record = self._memory._record_memory_history
        taken = inspect.signature(
            getattr(self._memory, "_record_memory_history_impl", record)
        ).parameters
        record("all", **{name: value for name, value in wanted.items() if name in taken})
        self._enabled_here = True

    def note(self, text: str) -> None:
        """Attach ``text`` to the entries that this thread makes from now on."""
        if self._set_note is not None:
            self._set_note(text)

    def stop(self) -> Any:
        """Return torch's snapshot. Turn the history off if this object turned it on."""
        try:
            self.note("")
            return self._memory._snapshot()
        finally:
            if self._enabled_here:
                self._enabled_here = False
                self._memory._record_memory_history(enabled=None)

    def entries(self, snapshot: Any, since_us: int) -> list[Any]:
        """Return this device's entries since ``since_us``, a Unix time in microseconds."""
        traces = snapshot.get("device_traces", [])
        index = self.device.index or 0
        found = traces[index] if index < len(traces) else []
        return [entry for entry in found if entry.get("time_us", since_us) >= since_us]
