"""Checks before credentials are sent to an address that a run's folder names.

A run's folder may come from anywhere. The credentials in the user's environment belong to the tracker that
the environment names. No other address gets them unless the user allows it.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import msgspec

from memlog._internal.patterns import lazy_pattern
from memlog._internal.redact import bare_address

# Strict, so that all URL parsers read the same host from an address that matches.
_SERVER = lazy_pattern(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:[/?#][^\s\\@]*)?",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_SCHEME = lazy_pattern(r"(?P<scheme>[a-z][a-z0-9.-]*)(?:\+[a-z0-9.+-]*)?:", re.IGNORECASE)
_ON_THIS_MACHINE = frozenset({"sqlite", "file", "offline", "disabled"})
_FILE = re.compile(r"file:(?://(?:localhost)?(?=/))?|sqlite(?:\+\w+)?:///", re.IGNORECASE)
"""Beginning of the address of a file or folder, before its path."""
_SECRET = lazy_pattern(
    r"token|passw|pwd|secret|key|credential|username|auth|client_cert", re.IGNORECASE
)


class CredentialScope(msgspec.Struct, frozen=True):
    """A tracker's address and credentials in the user's environment."""

    address: str | None
    """The tracker's address; ``None``: the environment names none."""
    credentials: tuple[str, ...] = ()
    """Variables and files with credentials that the tracker's client would send to any address."""
    own_schemes: frozenset[str] = frozenset()
    """Schemes such as ``databricks``. Their addresses name an entry in a user's file instead of a host."""
    defaults: tuple[str, ...] = ()
    """Files and folders in which the tracker's client stores runs if the environment names no address."""


def secret_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that hold credentials, judged by their names."""
    return tuple(
        sorted(name for name, value in environment.items() if value and _SECRET.search(name))
    )


def is_same_place(named: str, known: str | None) -> bool:
    """Return True if ``named`` equals ``known`` or has the same scheme, host and port.

    ``named`` is the address that a run names. ``known`` is an address from the user or the environment;
    ``None``: there is none. If ``named`` contains a user or password, ``named`` must equal ``known``.
    """
    if known is None:
        return False
    bare = bare_address(known)
    if named == known or named.rstrip("/") == bare.rstrip("/"):
        return True
    found = origin(named)
    return found is not None and found == origin(bare)


def withheld(
    address: str | None, scope: CredentialScope, trusted: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the names of variables and files with credentials that ``address`` must not get.

    A client that connects to ``address`` would send these credentials, although they belong to another
    tracker. If the result is empty, memlog may connect.

    ``address`` is the address in a run's folder; ``None``: the folder names no address. ``trusted`` are
    addresses that the user allows, in addition to the address of ``scope``.
    """
    if not address or _is_local(address, scope):
        return ()
    if any(is_same_place(address, known) for known in (scope.address, *trusted)):
        return ()
    return (*scope.credentials, *_netrc_files(address))


def is_other_file(address: str | None, scope: CredentialScope, trusted: Iterable[str] = ()) -> bool:
    """Return True if ``address`` is a file or folder that neither the environment nor the user names.

    The tracker's client would create a database there, or change the one that exists. See `withheld` for the
    arguments.
    """
    path = _path_of(address) if address and address not in scope.own_schemes else None
    if path is None:
        return False
    return path not in map(_path_of, filter(None, (scope.address, *scope.defaults, *trusted)))


def _path_of(address: str) -> Path | None:
    """Return the file or folder that ``address`` names; ``None`` for any other address."""
    found = _FILE.match(address)
    if found is None and _SCHEME.match(address):
        return None
    path = address[found.end() if found else 0 :].partition("?")[0]
    # Without links and dots, so that one file has one path.
    return Path(unquote(path) if found else path).expanduser().resolve()


def origin(address: str) -> tuple[str, str, int] | None:
    """Return the scheme, host and port of an HTTP address; ``None`` for any other address."""
    match = _SERVER.fullmatch(address)
    if match is None:
        return None
    scheme = match["scheme"].lower()
    return scheme, match["host"].lower(), int(match["port"] or _PORTS[scheme])


def _is_local(address: str, scope: CredentialScope) -> bool:
    if address in scope.own_schemes:
        return True
    match = _SCHEME.match(address)
    return match is None or match["scheme"].lower() in _ON_THIS_MACHINE | scope.own_schemes


def _netrc_files(address: str) -> Iterator[str]:
    """Yield the netrc files in which HTTP clients find a password for the address's host."""
    match = _SERVER.fullmatch(address)
    named = os.environ.get("NETRC")
    for name in [named] if named else ["~/.netrc", "~/_netrc"]:
        path = Path(name).expanduser()
        try:
            known = netrc.netrc(str(path))
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            yield name  # another HTTP client may be able to read this file, and find a password in it
            continue
        if match is None or known.authenticators(match["host"].lower()) is not None:
            yield name
