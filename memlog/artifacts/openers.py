"""Make pages that show flame graphs and snapshots in a browser. The content tells the kind of a file."""

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
_PROFILE = "profile.speedscope.json"
_KINDS = (
    "speedscope flame graphs (JSON that names speedscope's $schema, gzip or not), snapshots of CUDA's "
    "allocator (what torch.cuda.memory._dump_snapshot() writes, gzip or not)"
)
_SNAPSHOT_KEYS = (b"device_traces", b"total_size")


class Page(msgspec.Struct, frozen=True):
    """Files for a browser, held in memory. A request can't make the server open other files."""

    entry: str
    """Name of the first page in `files`, followed by ``#`` and the parameters of the page."""
    files: dict[str, tuple[str, bytes]]
    """Media type and content of each file, by the file's name."""
    notes: tuple[str, ...] = ()
    """Messages for the user. Each describes data that is missing in the file."""


def page_of(path: Path, announce: Callable[[str], object]) -> Page:
    """Return a page with speedscope's own files and the flame graphs of a file.

    The file is a speedscope file or a snapshot. Its content decides how it is shown, not its name.
    ``announce`` is called with one line of text before speedscope is downloaded.

    Raises:
        UnopenableFileError: The file is of another kind, damaged or too large.
        SnapshotError: The file is a snapshot that is damaged or unsafe.
        ViewerUnavailableError: Speedscope is not installed and can't be fetched.
        OSError: The file can't be read.
    """
    content = read_content(path)
    notes: tuple[str, ...] = ()
    if _is_snapshot(content):
        document, notes = exporters.snapshot_graph(parse_snapshot(content, path.name), path.name)
        content = msgspec.json.encode(document)
    elif not flamegraph.is_flamegraph(content):
        if content.lstrip()[:1] in (b"{", b"[") and b'"ph"' in content:
            raise UnopenableFileError(
                f"{path} is a trace in Chrome's format: open it at https://ui.perfetto.dev"
            )
        raise UnopenableFileError(f"{path} can't be shown: memlog opens {_KINDS}")
    try:
        flamegraph.check(content)
        folder = find_viewer(announce)
    except UnopenableFileError as error:
        raise UnopenableFileError(
            f"{path} can't be shown: {error}; write it again, or fetch it with `memlog pull`"
        ) from error
    except ViewerUnavailableError as error:
        raise ViewerUnavailableError(
            f"speedscope, which shows {path.absolute()}, is not in this install and can't be fetched "
            f"{error}, or open the file in another copy of speedscope"
        ) from error
    files = {
        file.name: (_TYPES.get(file.suffix, "application/octet-stream"), file.read_bytes())
        for file in folder.iterdir()
        if file.is_file()
    }
    files[_PROFILE] = (_TYPES[".json"], in_binary_units(content, path.name))
    # No `title` is passed, because it would replace the name of every profile. `left-heavy` shows the
    # layers that hold most memory first.
    return Page(f"index.html#profileURL={_PROFILE}&view=left-heavy", files, notes)


def is_openable(path: Path) -> bool:
    """Return True if the file can be read and is a speedscope file or a snapshot, even a damaged one."""
    try:
        content = read_content(path)
    except (UnopenableFileError, OSError):
        return False
    return _is_snapshot(content) or flamegraph.is_flamegraph(content)


def _is_snapshot(content: bytes) -> bool:
    """Return True if the content is a pickle with a snapshot's keys. The pickle is not loaded."""
    return content.startswith(PICKLE) and any(key in content for key in _SNAPSHOT_KEYS)
