"""Make pages that show files in a browser. Each kind of file has an opener that recognises the content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from memlog.artifacts import flamegraph
from memlog.artifacts.binary_units import in_binary_units
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
    """Files for a browser, held in memory. So the server opens no path that a request names."""

    entry: str
    """Address of the first page, relative to the address of the folder that contains all `files`."""
    files: dict[str, tuple[str, bytes]]
    """Media type and content, by name."""
    notes: tuple[str, ...] = ()
    """Messages for the user. Each describes data that is missing in the file."""


class FlamegraphOpener:
    """Opener that shows speedscope files in speedscope's own static build."""

    title = "speedscope flame graphs (JSON that names speedscope's $schema, gzip or not)"
    """Name of this kind of file, for messages."""
    _profile = "profile.speedscope.json"

    def recognises(self, content: bytes) -> bool:
        """Return True if the file names speedscope's schema."""
        return flamegraph.is_flamegraph(content)

    def page(self, content: bytes, title: str, announce: Callable[[str], object]) -> Page:
        """Return a page with speedscope's own files and the flame graphs in ``content``.

        Raises:
            UnopenableFileError: The file is damaged.
            ViewerUnavailableError: Speedscope is not installed and can't be fetched.
        """
        flamegraph.check(content)
        folder = find_viewer(announce)
        files = {
            path.name: (_TYPES.get(path.suffix, "application/octet-stream"), path.read_bytes())
            for path in folder.iterdir()
            if path.is_file()
        }
        files[self._profile] = (_TYPES[".json"], in_binary_units(content, title))
        # No `title` is passed, because it would replace the name of every profile. `left-heavy` shows the
        # layers that hold most memory first.
        entry = f"index.html#profileURL={self._profile}&view=left-heavy"
        return Page(entry, files)


class SnapshotOpener:
    """Opener that shows an allocator's snapshots as flame graphs of the memory in use."""

    title = "snapshots of CUDA's allocator (what torch.cuda.memory._dump_snapshot() writes, gzip or not)"
    _words = (b"device_traces", b"total_size")

    def recognises(self, content: bytes) -> bool:
        """Return True if the content is a pickle with a snapshot's keys. The pickle is not loaded."""
        return content.startswith(PICKLE) and any(word in content for word in self._words)

    def page(self, content: bytes, title: str, announce: Callable[[str], object]) -> Page:
        """Return a page with speedscope's own files and the snapshot's flame graphs.

        Raises:
            SnapshotError: The file is no snapshot, or is damaged or unsafe.
            ViewerUnavailableError: Speedscope is not installed and can't be fetched.
        """
        snapshot = parse_snapshot(content, title)
        graph = exporters.snapshot_graph(snapshot, title)
        encoded = msgspec.json.encode(graph.document)
        page = FlamegraphOpener().page(encoded, title, announce)
        return msgspec.structs.replace(page, notes=graph.notes)


OPENERS = (FlamegraphOpener(), SnapshotOpener())


def page_of(path: Path, announce: Callable[[str], object]) -> Page:
    """Return a page that shows a file.

    Args:
        path: The file. The content decides how the file is shown, not the name.
        announce: Function that is called with one line of text before speedscope is downloaded.

    Raises:
        UnopenableFileError: No opener recognises the file, or the file is damaged or too large.
        SnapshotError: The file is a snapshot that is damaged or unsafe.
        ViewerUnavailableError: Speedscope is not installed and can't be fetched.
        OSError: The file can't be read.
    """
    content = read_content(path)
    opener = _opener_of(content)
    if opener is None:
        known = ", ".join(opener.title for opener in OPENERS)
        raise UnopenableFileError(f"{path} can't be shown: memlog opens {known}")
    try:
        return opener.page(content, path.name, announce)
    except UnopenableFileError as error:
        raise UnopenableFileError(
            f"{path} can't be shown: {error}; write it again, or fetch it with `memlog pull`"
        ) from error
    except ViewerUnavailableError as error:
        raise ViewerUnavailableError(
            f"speedscope, which shows {path.absolute()}, is not in this install and can't be fetched "
            f"{error}, or open the file in another copy of speedscope"
        ) from error


def is_openable(path: Path) -> bool:
    """Return True if an opener recognises the file."""
    try:
        return _opener_of(read_content(path)) is not None
    except (UnopenableFileError, OSError):
        return False


def _opener_of(content: bytes) -> FlamegraphOpener | SnapshotOpener | None:
    return next((opener for opener in OPENERS if opener.recognises(content)), None)
