"""Where a run that the journal knows is: its address without, and the environment's with credentials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from memlog._internal.credential_scope import withheld
from memlog._internal.redact import bare_address, remember
from memlog.errors import UntrustedAddressError
from memlog.sink import DISABLED, OFFLINE, Backend, Connection, Sink, Target, home_of

trust_option = click.option(
    "--trust-address",
    "trusted",
    metavar="ADDRESS",
    multiple=True,
    help="Send your environment's credentials to this tracker, too, where the run names it.",
)


class Guard:
    """Keeps the environment's credentials from an address that a run's folder alone names.

    Args:
        backend: The tracker's.
        trusted: Addresses that the user has named.
    """

    def __init__(self, backend: Backend, trusted: Sequence[str] = ()) -> None:
        self._backend = backend
        self._home = home_of(backend)
        self._trusted = tuple(trusted)

    def require(self, address: str | None) -> None:
        """Returns where ``address`` may be asked.

        Raises:
            UntrustedAddressError: it would get credentials that are another's.
        """
        held = withheld(address, self._home, self._trusted)
        if not held:
            return
        home = self._home.address
        known = "names none" if home is None else f"names {bare_address(home)}"
        shown = bare_address(str(address))
        raise UntrustedAddressError(
            f"{self._backend.name}: the run names {shown} as its tracker, your environment {known}: nothing "
            f"was sent, since your credentials ({', '.join(held)}) would go there; where you know that "
            f"address, pass --trust-address {shown}"
        )

    def open_sink(self, target: Target) -> Sink:
        """The backend's, for a target whose every address may be asked."""
        runs = (target.joined, target.opened, target.beside)
        for address in (target.connection.uri, *(run.uri for run in runs if run is not None)):
            self.require(address)
        return self._backend.open_sink(target)


def connection_of(backend: Backend) -> Connection:
    """How its client would connect from here; what that holds of passwords is said by nobody."""
    connection = backend.connection()
    remember(connection.uri, *connection.environment.values())
    return connection


def known_address(known: str | None, connection: Connection) -> str | None:
    """The journal's address of a run, with the user and password that the environment has for it."""
    if known is None:
        return connection.uri
    for candidate in (connection.uri, *connection.environment.values()):
        if candidate and bare_address(candidate).rstrip("/") == known.rstrip("/"):
            return candidate
    return known


def told_place(backend: str, uri: str | None) -> str:
    """Where a tracker's run is, to follow its id; empty where nobody knows."""
    if not uri:
        return ""
    if uri.startswith(DISABLED):
        return ", disabled: nothing is kept of it"
    if uri.startswith(OFFLINE):
        folder = _near(uri.removeprefix(OFFLINE).rpartition("#")[0])
        return f", offline in {folder}: `{backend} sync {folder}` uploads it"
    return f" at {uri}"


def _near(folder: str) -> str:
    """A folder, from here where it is below."""
    path, here = Path(folder), Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else folder
