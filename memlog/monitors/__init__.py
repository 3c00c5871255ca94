"""Monitors that a training script creates. They publish events and print lines.

They can be created before ``memlog.init``. If no session runs, they only print.
"""

from memlog.monitors.blocks import (
    BatchMemoryProfiler,
    MemoryMonitor,
    MemoryTracker,
    monitor_memory,
    track_memory,
)
from memlog.monitors.loops import EpochMemoryMonitor, track_iterations, watch_loss

__all__ = [
    "BatchMemoryProfiler",
    "EpochMemoryMonitor",
    "MemoryMonitor",
    "MemoryTracker",
    "monitor_memory",
    "track_iterations",
    "track_memory",
    "watch_loss",
]
