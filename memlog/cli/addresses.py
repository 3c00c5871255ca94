"""Addresses of trackers. They can contain credentials in the environment, but never in the journal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from memlog._internal.connections import is_other_file, withheld
from memlog._internal.redact import bare_address, remember
from memlog.errors import UntrustedAddressError
from memlog.sink import DISABLED, OFFLINE, Backend, Connection, Sink, Target, home_of

trust_option = click.option(
    "--trust-address",
    "trusted",
    metavar="ADDRESS",
    multiple=True,
    help="Send your environment's credentials to this address, or write to this file, if the run names it.",
)


class Guard:
    """Check of the addresses in a run's folder, before memlog sends credentials there or writes files there.

    Another person may have made the folder. memlog sends the environment's credentials only to the address
    in the environment, and to the addresses in ``trusted``, which the user allows. The same is true of the
    files and folders in which trackers store runs.
    """

    def __init__(self, backend: Backend, trusted: Sequence[str] = ()) -> None:
        self._backend = backend
        self._scope = home_of(backend)
        self._trusted = tuple(trusted)

    def require(self, address: str | None) -> None:
        """Check that memlog may connect to ``address``.

        Raises:
            UntrustedAddressError: The address would get credentials that are meant for another tracker, or it
                is a file that the tracker's client would create or change.
        """
        if is_other_file(address, self._scope, self._trusted):
            raise self._refused(str(address))
        credentials = withheld(address, self._scope, self._trusted)
        if not credentials:
            return
        own = self._scope.address
        known = "names none" if own is None else f"names {bare_address(own)}"
        shown = bare_address(str(address))
        raise UntrustedAddressError(
            f"{self._backend.name}: the run names {shown} as its tracker, but your environment {known}. "
            f"Nothing was sent, because {shown} would get your credentials ({', '.join(credentials)}): if "
            f"you trust it, pass --trust-address {shown}"
        )

    def open_sink(self, target: Target) -> Sink:
        """Check each address that ``target`` contains, and return the backend's sink for ``target``."""
        runs = [run for run in (target.joined, target.opened, target.beside) if run is not None]
        for address in (target.connection.uri, *(run.uri for run in runs)):
            self.require(address)
        for run in runs:
            if Path(run.run_id).is_absolute():
                self._require_folder(run.run_id)
        return self._backend.open_sink(target)

    def _require_folder(self, folder: str) -> None:
        """Check that memlog may write an event file to ``folder``, which is a run of TensorBoard's.

        It may do so below the working directory, the environment's folder and those that the user names.
        """
        named = filter(None, (self._scope.address, *self._trusted))
        allowed = (Path.cwd(), *map(Path, named))
        if not any(Path(folder).resolve().is_relative_to(base.resolve()) for base in allowed):
            raise self._refused(folder)

    def _refused(self, path: str) -> UntrustedAddressError:
        shown = bare_address(path)
        return UntrustedAddressError(
            f"{self._backend.name}: the run names {shown} as its tracker, but your environment does not. "
            f"Nothing was written, because another person may have made the run's folder: if you trust "
            f"it, pass --trust-address {shlex.quote(shown)}"
        )


def connection_of(backend: Backend) -> Connection:
    """Return the connection that the backend's client would use in this process.

    After this call, memlog's messages leave out the connection's passwords.
    """
    connection = backend.connection()
    remember(connection.uri, *connection.environment.values())
    return connection


def known_address(known: str | None, connection: Connection) -> str | None:
    """Return a run's address. Add the user and password if the environment has them for this address.

    ``known`` is the address in the journal. If ``known`` is ``None``, return the environment's address.
    """
    if known is None:
        return connection.uri
    for candidate in (connection.uri, *connection.environment.values()):
        if candidate and bare_address(candidate).rstrip("/") == known.rstrip("/"):
            return candidate
    return known


def place_of(backend: str, uri: str | None) -> str:
    """Return the text to print after the id of a run in a tracker, such as ``" at http://host"``.

    The text names the address, or says that the run is disabled or offline. It is empty if the address is
    unknown.
    """
    if not uri:
        return ""
    if uri.startswith(DISABLED):
        return ", disabled: the tracker stores nothing of it"
    if uri.startswith(OFFLINE):
        folder, here = uri.removeprefix(OFFLINE).rpartition("#")[0], Path.cwd()
        if Path(folder).is_relative_to(here):
            folder = f"./{Path(folder).relative_to(here)}"
        return f", offline in {folder}: `{backend} sync {folder}` uploads it"
    return f" at {uri}"
