"""Everything that memlog raises on purpose.

::

    MemlogError
    ├── ConfigurationError (ValueError)   what was passed to init() or to a command can't be right
    │   ├── UnknownBackendError             a backend that nobody provides
    │   └── MissingExtraError               a backend whose client package is not installed
    ├── JournalError                      the run's own files
    │   ├── UnwritableDirectoryError        the folder for runs can't be written
    │   ├── RunNotFoundError                no run, or more than one, goes by that name
    │   └── TraceNotFoundError              no step of the run was traced, or its trace is damaged
    ├── ArtifactError                     files that runs keep: bringing them back, showing them
    │   ├── UnknownRunError                 the tracker has no run of that name
    │   ├── UnopenableFileError             a file that can't be shown, or is damaged
    │   └── ViewerUnavailableError          what shows it is not installed and can't be fetched
    ├── GateFailedError                   a gate of `memlog compare` failed, or could not be judged
    ├── LaunchError                       a command that `memlog run` can't start
    ├── DeliveryError                     what a sink raises
    │   ├── TrackerUnavailableError         try again later: nothing is lost meanwhile
    │   ├── TrackerRejectedError            the tracker understood and said no: trying again is no use
    │   │   └── RunRefusedError               its run is deleted or gone: what is for that one waits
    │   └── UntrustedAddressError           a run's folder names an address that is not the environment's
    └── SnapshotError                     a file is no snapshot of an allocator
        └── UnsafeSnapshotError             it holds what no snapshot holds, and nothing of it was run

Each message is one line that ends with the remedy; a wrong alert rule or gate has two lines more, which show
the place. What goes wrong *inside* memlog while training runs
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


class TraceNotFoundError(JournalError):
    """No step of the run was traced, or what is kept of it can't be read."""


class ArtifactError(MemlogError):
    """Files that a run keeps can't be brought back or shown."""


class UnknownRunError(ArtifactError):
    """The tracker has no run of that name."""


class UnopenableFileError(ArtifactError):
    """A file is nothing that can be shown, or it is damaged."""


class ViewerUnavailableError(ArtifactError):
    """The viewer that shows a file is not installed and can't be fetched."""


class GateFailedError(MemlogError):
    """What a gate of ``memlog compare`` says is true of a run, or nobody knows."""


class LaunchError(MemlogError):
    """The command that was to be recorded can't be run.

    Attributes:
        exit_code: What a shell would end with.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeliveryError(MemlogError):
    """A sink could not hand something over.

    Attributes:
        detail: What the tracker's client said, in full but without credentials, where the message is shorter.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class TrackerUnavailableError(DeliveryError):
    """The tracker can't be reached or is in trouble; the uploader tries again."""


class TrackerRejectedError(DeliveryError):
    """The tracker refused this content; the uploader isolates it, counts it and goes on."""


class RunRefusedError(TrackerRejectedError):
    """The tracker's run is deleted or gone: nothing can be written to it, whatever it is.

    The uploader keeps what is for that run, until it is there again, and goes on with others.
    """


class UntrustedAddressError(DeliveryError):
    """A run's folder names an address that must not be sent the environment's credentials."""


class SnapshotError(MemlogError):
    """A file is no snapshot of an allocator, can't be read, or is too large."""


class UnsafeSnapshotError(SnapshotError):
    """A snapshot holds what no snapshot holds: it may be an attack, and nothing of it was run."""
