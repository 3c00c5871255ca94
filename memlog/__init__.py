"""memlog: where the memory of your training goes, in the tracker that you already use.

::

    import memlog

    memlog.init("mlflow")
    ...                     # an unchanged PyTorch loop: steps are noticed by themselves
    memlog.finish()         # also done at exit
"""

from memlog._version import __version__
from memlog.errors import (
    ConfigurationError,
    DeliveryError,
    JournalError,
    MemlogError,
    MissingExtraError,
    RunNotFoundError,
    TrackerRejectedError,
    TrackerUnavailableError,
    UnknownBackendError,
    UnwritableDirectoryError,
)
from memlog.monitors import (
    BatchMemoryProfiler,
    EpochMemoryMonitor,
    MemoryMonitor,
    MemoryTracker,
    monitor_memory,
    track_iterations,
    track_memory,
    watch_loss,
)
from memlog.session import Session, finish, init

__all__ = [
    "BatchMemoryProfiler",
    "ConfigurationError",
    "DeliveryError",
    "EpochMemoryMonitor",
    "JournalError",
    "MemlogError",
    "MemoryMonitor",
    "MemoryTracker",
    "MissingExtraError",
    "RunNotFoundError",
    "Session",
    "TrackerRejectedError",
    "TrackerUnavailableError",
    "UnknownBackendError",
    "UnwritableDirectoryError",
    "__version__",
    "finish",
    "init",
    "monitor_memory",
    "track_iterations",
    "track_memory",
    "watch_loss",
]
