"""Base class of backends whose sink uses a tracker's client, and what the sinks of such backends share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.sink.protocols import ArtifactStore, Connection, Sink, Target, TrackerRun

_OF_CONNECTIONS = frozenset(
    {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"ssl_cert_file", "ssl_cert_dir", "requests_ca_bundle"}
)
"""Variables, in lower case, that HTTP clients read: proxies and certificates."""


class ClientVariables(msgspec.Struct, frozen=True):
    """Environment variables that a tracker's client reads. They include proxies and certificates."""

    prefixes: tuple[str, ...] = ()
    """Beginnings of the variables' names."""
    names: frozenset[str] = frozenset()
    """Further variables."""
    never: tuple[str, ...] = ()
    """Variables that must not be set in memlog's own processes."""
    always: Mapping[str, str] = {}
    """Variables with the values that they get in memlog's own processes."""

    def gathered(self) -> dict[str, str]:
        """Return the client's variables that are set in this process."""
        return {name: value for name, value in os.environ.items() if self._has(name)}

    def apply(self, connection: Connection) -> None:
        """Set the client's variables. Call this method only in memlog's own processes."""
        os.environ.update(connection.environment)
        for name in self.never:
            os.environ.pop(name, None)
        os.environ.update(self.always)

    def _has(self, name: str) -> bool:
        if name in self.never:
            return False
        known = name in self.names or name.lower() in _OF_CONNECTIONS
        return known or (bool(self.prefixes) and name.startswith(self.prefixes))


class ClientBackend:
    """Base class of a `Backend` whose sink is a class in a module of its own, which imports the client.

    A subclass sets `name`, `requires`, `extra` and `sink`. It overrides the methods in which its tracker
    differs. Without that, the user can't open a run in the tracker, no run goes on after an earlier process,
    and memlog fetches no files from the tracker.
    """

    name: str
    requires: str
    extra: str
    in_process: bool = False
    joins: ClassVar[bool] = True
    """False if the user can't open a run in the tracker: memlog then looks for none, and waits for none."""
    sink: ClassVar[str]
    """The sink's class as ``module:Class``. The class takes a `Target`."""
    store: ClassVar[str | None] = None
    """Class of the artifact store, which takes a `Connection`; ``None``: there is none."""
    variables: ClassVar[ClientVariables] = ClientVariables()

    def active_run(self) -> TrackerRun | None:
        """Return ``None``: there is no run that the user could have opened."""
        return None

    def last_step(self, run: TrackerRun) -> int | None:  # noqa: ARG002 - so for every run
        """Return ``None``: no run has earlier steps."""
        return None

    def may_go_on(self, run: TrackerRun) -> bool:  # noqa: ARG002 - so for every run
        """Return False: `last_step` knows each run's last step."""
        return False

    def connection(self) -> Connection:
        """Return the client's variables that are set in this process."""
        return Connection(environment=self.variables.gathered())

    def apply(self, connection: Connection, run: TrackerRun | None = None) -> None:  # noqa: ARG002 - for subclasses
        """Prepare a process of memlog's own for the import of the client.

        Args:
            connection: How the client connects.
            run: The run to write to or beside; ``None``: unknown.
        """
        self.variables.apply(connection)

    def prepare(self) -> None:
        """Import the sink's module, and with it the client."""
        self.apply(Connection())
        _loaded(self.sink)

    def open_sink(self, target: Target) -> Sink:
        """Import the client, and return a new sink. Call this method only in memlog's own processes."""
        self.apply(target.connection, target.joined or target.opened or target.beside)
        sink: Sink = _loaded(self.sink)(target)
        return sink

    def open_store(self, connection: Connection) -> ArtifactStore:
        """Return a new store of artifacts. Call this method only in memlog's own processes.

        Raises:
            TrackerRejectedError: There is no store.
        """
        if self.store is None:
            raise TrackerRejectedError(
                f"memlog fetches no files from {self.name}: leave out --backend to copy them from the run's "
                "own folder"
            )
        self.apply(connection)
        store: ArtifactStore = _loaded(self.store)(connection)
        return store


def distinct_name(name: str, cleaned: str, longest: int | None = None) -> str:
    """Return a name that a tracker accepts. Two names stay two.

    Args:
        name: The name itself.
        cleaned: The name without what the tracker refuses. If this differs from the name, or is too long, a
            digest of the name follows.
        longest: Maximum number of characters; ``None``: no limit.
    """
    if name and cleaned == name and (longest is None or len(name) <= longest):
        return name
    import hashlib  # noqa: PLC0415 - 3 ms of `import memlog`, and only the helper process needs it

    digest = hashlib.blake2s(name.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
    kept = cleaned if longest is None else cleaned[: longest - len(digest) - 1]
    return f"{kept}-{digest}"


def valid_text(text: object) -> str:
    """Return a text that UTF-8 can encode: a user's text may contain a lone surrogate."""
    return str(text).encode("utf-8", "backslashreplace").decode()


@contextmanager
def written(tracker: str, folder: Path) -> Iterator[None]:
    """Translate the errors of a block that writes files of a tracker.

    Raises:
        TrackerUnavailableError: the folder can't be written.
    """
    try:
        yield
    except OSError as error:
        raise TrackerUnavailableError(
            f"{tracker}'s folder {folder} can't be written ({error.strerror or error}): free its disk, or "
            "allow writing to it"
        ) from error


def _loaded(path: str) -> Any:
    # Imported here: a training process does not need it.
    from pkgutil import resolve_name  # noqa: PLC0415

    return resolve_name(path)
