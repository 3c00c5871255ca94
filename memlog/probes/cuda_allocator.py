"""Settings, recorded history and segments of torch's caching allocator, read through private functions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any


def allocator_settings(torch: Any) -> str:
    """Return the allocator's settings, as in the variable ``PYTORCH_ALLOC_CONF``; empty: the defaults.

    Older versions of torch have no function that returns the settings. With those, return the variable.
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - no public way
    if settings is not None:
        return str(settings())
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


def has_expandable_segments(settings: str | None) -> bool:
    """Return True if the settings turn on expandable segments. ``None``: unknown settings."""
    return "expandable_segments:True" in (settings or "")


def records_history(torch: Any, kind: str = "cuda") -> bool:
    """Return True if the allocator of a kind of devices records a history of allocations."""
    is_on = getattr(torch._C, f"_{kind}_isHistoryEnabled", None)  # noqa: SLF001 - no public way
    return is_on is not None and bool(is_on())


def segments_without_history(torch: Any) -> list[Mapping[str, Any]] | None:
    """Return the segments of all CUDA devices; ``None`` if reading them could take long.

    A recorded history can have millions of entries. Older versions of torch copy it with the segments.
    """
    memory_snapshot = torch.cuda.memory.memory_snapshot
    if "include_traces" in inspect.signature(memory_snapshot).parameters:
        found: list[Mapping[str, Any]] = memory_snapshot(include_traces=False)
        return found
    return None if records_history(torch) else memory_snapshot()
