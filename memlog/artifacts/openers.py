"""What can be shown, recognised by what is in a file: one `Opener` for each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from memlog.artifacts import flamegraph
from memlog.artifacts.contents import PICKLE, read_content
from memlog.artifacts.snapshots import parse_snapshot
from memlog.artifacts.viewer import find_viewer
from memlog.errors import UnopenableFileError, ViewerUnavailableError
from memlog.trace import exporters

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


class Page(msgspec.Struct, frozen=True):
    """What a browser is served: whole files in memory, so that no path is ever looked up."""

    entry: str
    """The address to begin with, relative to the page's own folder."""
    files: dict[str, tuple[str, bytes]]
    """Media type and content, by name."""
    notes: tuple[str, ...] = ()
    """What is odd about the file, for the user."""


class Opener(Protocol):
    """Shows one kind of file."""

    title: str
    """What it opens, for messages."""

    def recognises(self, content: bytes) -> bool:
        """Whether this is such a file, by what is in it. Never raises."""

    def page(self, content: bytes, title: str, announce: Callable[[str], object]) -> Page:
        """Checks the file and makes a page of it.

        Raises:
            UnopenableFileError: it is damaged.
            SnapshotError: it is a pickle, and no snapshot.
            ViewerUnavailableError: what shows it is missing.
        """


class FlamegraphOpener:
    """Shows speedscope files in speedscope's own static build."""

    title = "speedscope flame graphs (JSON that names speedscope's $schema, gzip or not)"
    _profile = "profile.speedscope.json"

    def recognises(self, content: bytes) -> bool:
        """Whether it says so itself."""
        return flamegraph.is_flamegraph(content)

    def page(self, content: bytes, title: str, announce: Callable[[str], object]) -> Page:
        """The viewer's files and this one profile."""
        notes = flamegraph.check(content)
        folder = find_viewer(announce)
        files = {
            path.name: (_TYPES.get(path.suffix, "application/octet-stream"), path.read_bytes())
            for path in folder.iterdir()
            if path.is_file()
        }
        files[self._profile] = (_TYPES[".json"], content)
        entry = f"index.html#profileURL={self._profile}&title={quote(title, safe='')}"
        return Page(entry, files, tuple(notes))


class SnapshotOpener:
    """Shows snapshots of an allocator as flame graphs of what holds its memory."""

    title = "snapshots of CUDA's allocator (what torch.cuda.memory._dump_snapshot() writes, gzip or not)"
    _words = (b"device_traces", b"total_size")

    def recognises(self, content: bytes) -> bool:
        """Whether it is a pickle with a snapshot's own words in it; it is not loaded for that."""
        return content.startswith(PICKLE) and any(word in content for word in self._words)

    def page(self, content: bytes, title: str, announce: Callable[[str], object]) -> Page:
        """Its flame graph's page."""
        snapshot = parse_snapshot(content, title)
        graph = exporters.snapshot_graph(snapshot, title)
        encoded = msgspec.json.encode(graph.document)
        page = FlamegraphOpener().page(encoded, title, announce)
        return msgspec.structs.replace(page, notes=(*graph.notes, *page.notes))


OPENERS: tuple[Opener, ...] = (FlamegraphOpener(), SnapshotOpener())


def page_of(path: Path, announce: Callable[[str], object]) -> Page:
    """What shows a file, whatever its name is.

    Args:
        path: The file.
        announce: Told in one line of what takes a while.

    Raises:
        UnopenableFileError: nothing here shows it, or it is damaged.
        SnapshotError: it is a snapshot that is damaged, or unsafe.
        ViewerUnavailableError: what shows it is missing.
        OSError: it can't be read.
    """
    content = read_content(path)
    opener = _opener_of(content)
    if opener is None:
        known = ", ".join(opener.title for opener in OPENERS)
        raise UnopenableFileError(f"{path} is nothing that memlog can show: it opens {known}")
    try:
        return opener.page(content, path.name, announce)
    except UnopenableFileError as error:
        raise UnopenableFileError(
            f"{path} can't be shown: {error}; write it again, or fetch it with `memlog pull`"
        ) from error
    except ViewerUnavailableError as error:
        raise ViewerUnavailableError(
            f"speedscope, which shows {path.absolute()}, is not in this install and can't be fetched "
            f"{error}, or drop the file on a copy of speedscope's page that you have"
        ) from error


def is_openable(path: Path) -> bool:
    """Whether `page_of` would know what to do with a file."""
    try:
        return _opener_of(read_content(path)) is not None
    except (UnopenableFileError, OSError):
        return False


def _opener_of(content: bytes) -> Opener | None:
    return next((opener for opener in OPENERS if opener.recognises(content)), None)
