"""Address of a Trackio run as one text.

The text is the address of the run's folder or server, followed by ``?project=…&run=…``.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

_FOLDER = "file://"
_SPACE = ".hf.space"


class RunAddress(NamedTuple):
    """Parts of a run's address."""

    location: str
    """``file:///folder``, or the server's address without its write token."""
    project: str | None = None
    run: str | None = None
    """Name of the run, not the run's id."""

    def __str__(self) -> str:
        query = {key: value for key, value in self._asdict().items() if value}
        del query["location"]
        return f"{self.location}?{urlencode(query, quote_via=quote)}" if query else self.location

    @property
    def folder(self) -> Path | None:
        """The folder with the projects' databases; ``None`` if a server has them."""
        if not self.location.startswith(_FOLDER):
            return None
        return Path(unquote(self.location.removeprefix(_FOLDER)))

    @property
    def is_space(self) -> bool:
        """True if a Space of Hugging Face serves the run."""
        return (urlsplit(self.location).hostname or "").endswith(_SPACE)


def run_address(uri: str) -> RunAddress:
    """Parse an address."""
    location, _, query = uri.partition("?")
    found = parse_qs(query)
    return RunAddress(location, *(found.get(key, [None])[0] for key in ("project", "run")))


def in_folder(folder: Path) -> str:
    """Return the folder as a ``file://`` address, for `RunAddress.location`."""
    return f"{_FOLDER}{quote(str(folder.absolute()))}"


def on_server(url: str) -> str:
    """Return a server's address without the write token that ``url`` may contain."""
    return f"{url.partition('?')[0].rstrip('/')}/"


def in_space(space_id: str) -> str:
    """Return the address of the server of a Space. ``space_id`` is an id such as ``user/space``."""
    subdomain = space_id.lower()
    for sign in "/_.":
        subdomain = subdomain.replace(sign, "-")
    return f"https://{subdomain}{_SPACE}/"


def link_to(address: RunAddress) -> str:
    """Return the address of the project's page or, for runs in a folder, the command that serves the page."""
    if address.folder is None:
        return str(address._replace(run=None))
    return f"trackio show --project {shlex.quote(address.project or '')}"
