"""Replacement of ``src.utils.memory_monitor``: six monitors of memlog with the old names and signatures.

The monitors come from `memlog.monitors`, and have the old defaults. docs/project/old-monitors.md lists how
their printed lines differ from the old ones.
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
