"""Double of torch's public functions that read devices' memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

GIB = 1024**3


def stat(current: int, peak: int) -> dict[str, dict[str, int]]:
    pool = {"current": current, "peak": peak, "allocated": 2 * peak, "freed": 2 * peak - current}
    nothing = dict.fromkeys(pool, 0)
    return {"all": pool, "large_pool": pool, "small_pool": nothing}


def nested(allocated: int, reserved: int, peak: int, split: int = 0) -> dict[Any, Any]:
    """Return statistics in the form of ``torch._C._cuda_memoryStats``."""
    return {
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "max_split_size": -1,
        "oversize_allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
        "allocation": stat(10, 20),
        "active_bytes": stat(allocated, peak),
        "allocated_bytes": stat(allocated, peak),
        "requested_bytes": stat(allocated, peak),
        "reserved_bytes": stat(reserved, reserved),
        "reserved_bytes_by_private_pools": {(0, 1): stat(0, 0)},
        "inactive_split_bytes": stat(split, split),
    }


def flat(stats: Any, prefix: str = "") -> dict[str, int]:
    """Return statistics in the form of ``torch.cuda.memory_stats``."""
    entries: dict[str, int] = {}
    for key, value in stats.items():
        name = f"{prefix}{'_'.join(map(str, key)) if isinstance(key, tuple) else key}"
        entries |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return entries


class Devices:
    """The functions of ``torch.cuda``, ``torch.xpu`` and the like that memlog uses."""

    def __init__(self, *stats: dict[Any, Any] | Exception) -> None:
        self.stats = list(stats)
        self.selected = 0
        self.initialized = True
        self.asked: list[int] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self.stats)

    def current_device(self) -> int:
        assert self.initialized, "would initialise the device"
        return self.selected

    current_device_index = current_device

    def get_allocator_backend(self) -> str:
        return "native"

    def nested_stats(self, index: int) -> dict[Any, Any]:
        assert self.initialized, "would initialise the device"
        self.asked.append(index)
        stats = self.stats[index]
        if isinstance(stats, Exception):
            raise stats
        return stats

    def memory_stats(self, index: int) -> dict[str, int]:
        return flat(self.nested_stats(index))

    def get_device_properties(self, index: int) -> SimpleNamespace:
        found = SimpleNamespace(name=f"Thing {index}", total_memory=80 * GIB, is_integrated=index)
        if index == 0:
            found.uuid = UUID(int=0)
        return found


class Torch(SimpleNamespace):
    """A double of torch, built for one kind of device."""

    def __init__(self, **kinds: Any) -> None:
        idle = Devices()
        idle.initialized = False
        super().__init__(
            cuda=kinds.get("cuda", idle),
            xpu=kinds.get("xpu", idle),
            version=SimpleNamespace(cuda="13.0" if "cuda" in kinds else None, hip=None),
            backends=SimpleNamespace(mps=SimpleNamespace(is_built=lambda: "mps" in kinds)),
            accelerator=kinds.get("accelerator", SimpleNamespace()),
            _C=SimpleNamespace(),
        )
        for kind, devices in kinds.items():
            setattr(self, kind, devices)
