"""Replacement of ``src.utils.memory_monitor``: six names, with their old signatures and defaults.

The names are memlog's own monitors. docs/monitors.md lists how their printed lines differ from the old ones.
"""

from memlog.monitors import (
    BatchMemoryProfiler,
    EpochMemoryMonitor,
    MemoryMonitor,
    MemoryTracker,
    monitor_memory,
    track_memory,
)

__all__ = [
    "BatchMemoryProfiler",
    "EpochMemoryMonitor",
    "MemoryMonitor",
    "MemoryTracker",
    "monitor_memory",
    "track_memory",
]
