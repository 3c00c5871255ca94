"""Made-up histories of a device's allocator: by hand, or from real allocations on a CPU."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.device_snapshots import entry


class Script:
    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._sizes: dict[int, int] = {}
        self._time_us = 1_000_000

    def say(self, action: str, note: str = "", **values: Any) -> None:
        self._time_us += 5
        self.entries.append(entry(action, self._time_us, user_metadata=note, **values))

    def alloc(self, address: int, size: int, note: str = "") -> None:
        self._sizes[address] = size
        self.say("alloc", note, addr=address, size=size)

    def free(self, address: int, note: str = "", size: int | None = None) -> None:
        size = self._sizes.pop(address, 0) if size is None else size
        self.say("free_requested", note, addr=address, size=size)
        self.say("free_completed", note, addr=address, size=size)


class SimulatedHistory(TorchDispatchMode):
    """Simulated allocator history of a device, made of the CPU's storages, with CUDA's annotations."""

    def __init__(self, *, takes_notes: bool = True) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.takes_notes = takes_notes
        self._notes = threading.local()
        self._entries: list[dict[str, Any]] = []
        self._live: set[int] = set()

    def start(self) -> None:
        self.__enter__()

    def note(self, text: str) -> None:
        assert len(text) <= 15
        self._notes.text = text

    def stop(self) -> Any:
        self.__exit__(None, None, None)
        return {"segments": [], "device_traces": [list(self._entries)]}

    def entries(self, snapshot: Any, since_us: int) -> list[Any]:
        return [entry for entry in snapshot["device_traces"][0] if entry["time_us"] >= since_us]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(one.alias_info is None for one in func._schema.returns):
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in self._live:
            self._live.add(address)
            self._emit("alloc", address, size)
            weakref.finalize(storage, self._gone, address, size)

    def _gone(self, address: int, size: int) -> None:
        self._live.discard(address)
        self._emit("free_requested", address, size)

    def _emit(self, action: str, address: int, size: int) -> None:
        entry = {"action": action, "addr": address, "size": size, "time_us": time.time_ns() // 1000}
        if self.takes_notes:
            entry["user_metadata"] = getattr(self._notes, "text", "")
        self._entries.append(entry)
