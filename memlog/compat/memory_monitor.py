"""Replacement of ``src.utils.memory_monitor``: six names, with their old signatures and defaults.

They are memlog's own monitors. docs/monitors.md lists how the lines that they print differ from the old ones.
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
