"""Whether an address that a run's folder names may be sent the credentials of whoever delivers the run.

A run's folder may come from anywhere. What the user's environment holds belongs to the tracker that the
environment itself names: another one gets none of it, unless the user says so.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from memlog._internal.redact import bare_address

# So strict that no two readers of addresses can take one for different hosts.
_SERVER = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:[/?#][^\s\\@]*)?",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9.-]*)(?:\+[a-z0-9.+-]*)?:", re.IGNORECASE)
_ON_THIS_MACHINE = frozenset({"sqlite", "file", "offline", "disabled"})
_SECRET = re.compile(
    r"token|passw|pwd|secret|key|credential|username|auth|client_cert", re.IGNORECASE
)


class Home(msgspec.Struct, frozen=True):
    """What the environment alone says of a tracker."""

    address: str | None
    """Where it is; ``None``: nobody has said."""
    credentials: tuple[str, ...] = ()
    """Variables and files from which its client would take credentials, whatever the address."""
    own_schemes: frozenset[str] = frozenset()
    """Of addresses that name no host, but a place in a file of the user's."""


def secret_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that hold credentials, as their names tell."""
    return tuple(
        sorted(name for name, value in environment.items() if value and _SECRET.search(name))
    )


def is_same_place(named: str, known: str | None) -> bool:
    """Whether an address that a run names is a known one, or of the same server: scheme, host and port.

    The run's is taken as it stands: with anything cut out of it, it would be another address.
    """
    if known is None:
        return False
    bare = bare_address(known)
    if named == known or named.rstrip("/") == bare.rstrip("/"):
        return True
    origin = _origin(named)
    return origin is not None and origin == _origin(bare)


def withheld(address: str | None, home: Home, trusted: Iterable[str] = ()) -> tuple[str, ...]:
    """The credentials that would go to ``address`` although they are another's; empty: it may be asked.

    Args:
        address: What a run's folder names; ``None``: nothing.
        home: What the environment says.
        trusted: Addresses that the user has named, too.
    """
    if not address or _is_local(address, home):
        return ()
    if any(is_same_place(address, known) for known in (home.address, *trusted)):
        return ()
    return (*home.credentials, *_netrc_files(address))


def _origin(address: str) -> tuple[str, str, int] | None:
    match = _SERVER.fullmatch(address)
    if match is None:
        return None
    scheme = match["scheme"].lower()
    return scheme, match["host"].lower(), int(match["port"] or _PORTS[scheme])


def _is_local(address: str, home: Home) -> bool:
    if address in home.own_schemes:
        return True
    match = _SCHEME.match(address)
    return match is None or match["scheme"].lower() in _ON_THIS_MACHINE | home.own_schemes


def _netrc_files(address: str) -> Iterator[str]:
    """The files in which HTTP clients find a password by the address's host, or by none."""
    match = _SERVER.fullmatch(address)
    named = os.environ.get("NETRC")
    for name in [named] if named else ["~/.netrc", "~/_netrc"]:
        path = Path(name).expanduser()
        try:
            known = netrc.netrc(str(path))
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            yield name  # other clients may read it all the same
            continue
        if match is None or known.authenticators(match["host"].lower()) is not None:
            yield name
