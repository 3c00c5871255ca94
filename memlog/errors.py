"""Errors that memlog raises on purpose.

::

    MemlogError
    ├── ConfigurationError (ValueError)   an argument of init() or of a command is invalid
    │   ├── UnknownBackendError             no installed package provides the backend
    │   └── MissingExtraError               the backend's client package is not installed
    ├── JournalError                      the run's own files can't be read or written
    │   ├── UnwritableDirectoryError        the folder for runs can't be written
    │   ├── RunNotFoundError                no run has that name
    │   │   └── AmbiguousRunError             more than one has it
    │   └── TraceNotFoundError              no step of the run was traced, or its trace is damaged
    ├── ArtifactError                     a run's files can't be fetched or shown
    │   ├── UnknownRunError                 the tracker has no run of that name
    │   ├── UnopenableFileError             the file can't be shown, or is damaged
    │   └── ViewerUnavailableError          the viewer is not installed and can't be fetched
    ├── GateFailedError                   a gate of `memlog compare` failed, or could not be judged
    ├── LaunchError                       `memlog run` can't start the command
    ├── DeliveryError                     a sink failed
    │   ├── TrackerUnavailableError         a later attempt can succeed, and nothing is lost until then
    │   ├── TrackerRejectedError            the tracker refused the content, and trying again does not help
    │   │   └── RunRefusedError               the tracker's run is deleted or missing; its data is kept
    │   └── UntrustedAddressError           a run's folder names an address that must not get credentials
    └── SnapshotError                     the file is not an allocator snapshot
        └── UnsafeSnapshotError             the file may be an attack; memlog executed nothing from it

Each message is one line that ends with the remedy. A wrong alert rule or gate has two more lines, which show
the position of the mistake. Errors *inside* memlog are never raised while training runs. memlog logs them
once per cause and counts them in `memlog.events.Health`.
"""

from __future__ import annotations


class MemlogError(Exception):
    """Base class: ``except memlog.MemlogError`` catches every error that memlog raises."""


class ConfigurationError(MemlogError, ValueError):
    """Invalid argument, configuration key or environment variable."""


class UnknownBackendError(ConfigurationError):
    """No installed package provides a backend with that name."""


class MissingExtraError(ConfigurationError):
    """The backend is installed, but its tracker's client package is not."""


class JournalError(MemlogError):
    """The run's own files can't be read or written."""


class UnwritableDirectoryError(JournalError):
    """The folder for runs can't be created or written."""


class RunNotFoundError(JournalError):
    """No run has that name. The subclass `AmbiguousRunError` means that more than one run has the name."""


class AmbiguousRunError(RunNotFoundError):
    """More than one run has that name, or more than one run's id begins with that name."""


class TraceNotFoundError(JournalError):
    """No step of the run was traced, or its trace can't be read."""


class ArtifactError(MemlogError):
    """Files of a run can't be fetched or shown."""


class UnknownRunError(ArtifactError):
    """The tracker has no run of that name."""


class UnopenableFileError(ArtifactError):
    """A file is of a type that can't be shown, or it is damaged."""


class ViewerUnavailableError(ArtifactError):
    """The viewer that shows a file is not installed and can't be fetched."""


class GateFailedError(MemlogError):
    """A gate of ``memlog compare`` failed for a run, or could not be judged."""


class LaunchError(MemlogError):
    """The command passed to ``memlog run`` can't be started.

    Attributes:
        exit_code: Exit code that a shell would return for this command.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeliveryError(MemlogError):
    """A sink could not deliver data.

    Attributes:
        detail: Full text of the client's error, without credentials; empty if there is no text. The message
            may contain only the beginning of this text.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class TrackerUnavailableError(DeliveryError):
    """The tracker can't be reached or has a problem; the uploader tries again."""


class TrackerRejectedError(DeliveryError):
    """The tracker refused this content. The uploader isolates it, counts it and continues."""


class RunRefusedError(TrackerRejectedError):
    """The tracker's run is deleted or missing, so nothing can be written to it.

    The uploader keeps the data for that run until the run exists again, and continues with other runs.
    """


class UntrustedAddressError(DeliveryError):
    """A run's folder names an address that must not receive the environment's credentials."""


class SnapshotError(MemlogError):
    """A file is not an allocator snapshot, can't be read, or is too large."""


class UnsafeSnapshotError(SnapshotError):
    """A snapshot contains content that may be an attack. memlog executed nothing from it."""
