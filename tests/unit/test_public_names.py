"""The names that `import memlog` offers."""

import memlog


def test_only_public_names_are_listed() -> None:
    assert dir(memlog) == sorted(memlog.__all__)
    assert memlog.MemoryTracer is not None  # loaded on first use
    assert dir(memlog) == sorted(memlog.__all__)


def test_the_public_names_are_fixed() -> None:
    assert memlog.__all__ == [
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
