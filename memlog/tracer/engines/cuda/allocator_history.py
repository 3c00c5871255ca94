"""A device allocator's own history, which belongs to whoever turned it on first."""

from __future__ import annotations

import inspect
from typing import Any

import torch

MAX_ENTRIES = 131_072
"""Of the ring, 136 bytes each, for every device. torch's own default has no bound."""


class AllocatorHistory:
    """The history of one device's allocator.

    Where the user has it on already, nothing is turned on, off or cleared: our notes are attached to the
    entries, and only those of the window are read.

    Args:
        device: A CUDA or XPU device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: Any = getattr(torch, device.type).memory
        self._set_note = getattr(self._memory, "_set_memory_metadata", None)
        self._get_note = getattr(self._memory, "_get_memory_metadata", None)
        self._enabled_here = False
        self.takes_notes = self._set_note is not None

    def refusal(self) -> str | None:
        """Why it can't be used here and now; ``None`` where it can."""
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
        if self._get_note is not None and self._get_note():
            return "the program attaches memory metadata of its own"
        return None

    def start(self) -> None:
        """Turns it on, unless it is."""
        if self._on():
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
        """Attaches ``text`` to this thread's later entries."""
        if self._set_note is not None:
            self._set_note(text)

    def stop(self) -> Any:
        """Reads the history, and turns it off where this turned it on.

        Returns:
            The snapshot, as ``torch.cuda.memory._snapshot()`` gives it.
        """
        try:
            self.note("")
            return self._memory._snapshot()
        finally:
            if self._enabled_here:
                self._enabled_here = False
                self._memory._record_memory_history(enabled=None)

    def entries(self, snapshot: Any, since_us: int) -> list[Any]:
        """This device's entries of the window."""
        traces = snapshot.get("device_traces", [])
        index = self.device.index or 0
        found = traces[index] if index < len(traces) else []
        return [entry for entry in found if entry.get("time_us", since_us) >= since_us]

    def may_have_dropped(self, entries: int) -> bool:
        """Whether the ring may have been too small for the window."""
        return entries >= MAX_ENTRIES

    def _on(self) -> bool:
        enabled = getattr(torch._C, f"_{self.device.type}_isHistoryEnabled", None)
        return bool(enabled()) if enabled is not None else False
