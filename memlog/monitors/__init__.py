"""Monitors that a training script creates. They publish events and print lines.

They can be created before ``memlog.init``. If no session runs, they only print.
"""

from memlog.monitors.epochs import EpochMemoryMonitor
from memlog.monitors.evaluations import track_iterations, watch_loss
from memlog.monitors.points import MemoryMonitor, MemoryTracker
from memlog.monitors.scopes import BatchMemoryProfiler, monitor_memory, track_memory

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
