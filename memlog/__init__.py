"""memlog: records the memory use of your training in the tracker that you already use.

::

    import memlog

    memlog.init("mlflow")
    ...                     # an unchanged PyTorch loop: memlog detects the optimizer steps
    memlog.finish()         # memlog also calls this at exit

PYTEST_DONT_REWRITE: pytest looks for this word. Without it, pytest would warn under ``memlog run``, because
memlog is then imported before its plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memlog._version import __version__
from memlog.errors import (
    ConfigurationError,
    DeliveryError,
    JournalError,
    MemlogError,
    MissingExtraError,
    RunNotFoundError,
    SnapshotError,
    TrackerRejectedError,
    TrackerUnavailableError,
    UnknownBackendError,
    UnsafeSnapshotError,
    UnwritableDirectoryError,
)

if TYPE_CHECKING:
    from memlog.estimates.estimate import Estimate, estimate
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
    from memlog.session.phases import phase
    from memlog.session.session import Session, current_session, finish, init, snapshot
    from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = [
    "BatchMemoryProfiler",
    "ConfigurationError",
    "DeliveryError",
    "EpochMemoryMonitor",
    "Estimate",
    "JournalError",
    "LayerMemoryStats",
    "MemlogError",
    "MemoryEvent",
    "MemoryMonitor",
    "MemoryTracer",
    "MemoryTracker",
    "MissingExtraError",
    "RunNotFoundError",
    "Session",
    "SnapshotError",
    "TrackerRejectedError",
    "TrackerUnavailableError",
    "UnknownBackendError",
    "UnsafeSnapshotError",
    "UnwritableDirectoryError",
    "__version__",
    "current_session",
    "estimate",
    "finish",
    "init",
    "monitor_memory",
    "phase",
    "snapshot",
    "track_iterations",
    "track_memory",
    "watch_loss",
]


_LOADED_ON_USE = {
    "BatchMemoryProfiler": "memlog.monitors",
    "EpochMemoryMonitor": "memlog.monitors",
    "Estimate": "memlog.estimates",
    "LayerMemoryStats": "memlog.tracer",
    "MemoryEvent": "memlog.tracer",
    "MemoryMonitor": "memlog.monitors",
    "MemoryTracer": "memlog.tracer",
    "MemoryTracker": "memlog.monitors",
    "Session": "memlog.session.session",
    "current_session": "memlog.session.session",
    "estimate": "memlog.estimates",
    "finish": "memlog.session.session",
    "init": "memlog.session.session",
    "load_ipython_extension": "memlog.session.magics",  # for `%load_ext memlog`
    "monitor_memory": "memlog.monitors",
    "phase": "memlog.session.phases",
    "snapshot": "memlog.session.session",
    "track_iterations": "memlog.monitors",
    "track_memory": "memlog.monitors",
    "watch_loss": "memlog.monitors",
}
"""Public names that are imported only on their first use, each with its module. `memlog --version` needs none
of them."""


def __getattr__(name: str) -> Any:
    """Import a name of `_LOADED_ON_USE` from its module, on first use."""
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names only."""
    return sorted(__all__)
