"""What a trainer holds: monitors that publish, and print through the one console subscriber.

They can be made before ``memlog.init`` and used without it: then they only print.
"""

from memlog.monitors.epochs import EpochMemoryMonitor
from memlog.monitors.evaluations import watch_loss
from memlog.monitors.iterations import track_iterations
from memlog.monitors.points import MemoryMonitor, MemoryTracker
from memlog.monitors.profiler import BatchMemoryProfiler
from memlog.monitors.scopes import monitor_memory, track_memory

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
