"""Everything that memlog raises on purpose.

::

    MemlogError
    ├── ConfigurationError (ValueError)   what was passed to init() or to a command can't be right
    │   ├── UnknownBackendError             a backend that nobody provides
    │   └── MissingExtraError               a backend whose client package is not installed
    ├── JournalError                      the run's own files
    │   ├── UnwritableDirectoryError        the folder for runs can't be written
    │   └── RunNotFoundError                no run, or more than one, goes by that name
    ├── DeliveryError                     what a sink raises
    │   ├── TrackerUnavailableError         try again later: nothing is lost meanwhile
    │   └── TrackerRejectedError            the tracker understood and said no: trying again is no use
    └── SnapshotError                     a file is no snapshot of an allocator
        └── UnsafeSnapshotError             it holds what no snapshot holds, and nothing of it was run

Each message is one line that ends with the remedy; a wrong alert rule has two lines more, which show the
place. What goes wrong *inside* memlog while training runs
is never raised: it is logged once per cause and counted in the run's health.
"""

from __future__ import annotations


class MemlogError(Exception):
    """The root: ``except memlog.MemlogError`` catches all that memlog raises."""


class ConfigurationError(MemlogError, ValueError):
    """An argument, a configuration key or an environment variable can't be right."""


class UnknownBackendError(ConfigurationError):
    """No installed package provides a backend of that name."""


class MissingExtraError(ConfigurationError):
    """The backend is known, but the tracker's client package is not installed."""


class JournalError(MemlogError):
    """The run's own files can't be read or written."""


class UnwritableDirectoryError(JournalError):
    """The folder for runs can't be created or written."""


class RunNotFoundError(JournalError):
    """No run, or more than one, goes by that name."""


class DeliveryError(MemlogError):
    """A sink could not hand something over."""


class TrackerUnavailableError(DeliveryError):
    """The tracker can't be reached or is in trouble; the courier tries again."""


class TrackerRejectedError(DeliveryError):
    """The tracker refused this content; the courier isolates it, counts it and goes on."""


class SnapshotError(MemlogError):
    """A file is no snapshot of an allocator, can't be read, or is too large."""


class UnsafeSnapshotError(SnapshotError):
    """A snapshot holds what no snapshot holds: it may be an attack, and nothing of it was run."""
