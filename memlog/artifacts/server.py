"""Pages that show flame graphs and snapshots in a browser, served on loopback to this user only.

The files are in memory and found by their exact address, so no address leads to another file. Each address
begins with a random part, so other users of the machine can't request the files. The ``Host`` header of a
request must name this machine. Otherwise another web site could make its own host name point to this server
and read the files (DNS rebinding). A Content-Security-Policy lets the page connect to this server only.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

import msgspec

from memlog.artifacts import flamegraph
from memlog.artifacts.contents import PICKLE, read_content
from memlog.artifacts.flamegraph import find_viewer, in_binary_units
from memlog.artifacts.snapshots import parse_snapshot
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


LOOPBACK = "127.0.0.1"

_HOST = re.compile(rf"(?:{re.escape(LOOPBACK)}|localhost)(?::[0-9]{{1,5}})?", re.IGNORECASE)
"""Pattern of the accepted ``Host`` headers. Any port is accepted, because a browser uses another port if the
user forwards the server's port with ssh."""
_TIMEOUT = 30.0
"""Seconds after which an idle connection is closed."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """HTTP server of one page. If ``port`` is 0, the server uses a free port.

    Raises:
        OSError: The port is in use.
    """

    daemon_threads = True

    def __init__(self, page: Page, port: int = 0) -> None:
        self._prefix = f"/{secrets.token_urlsafe(16)}/"
        self._page = page
        super().__init__((LOOPBACK, port), _Handler)

    def server_bind(self) -> None:
        """Bind the server's address. The parent class would also ask a name server for the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a browser that closes a connection is no error."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}{self._prefix}{self._page.entry}"

    def find(self, target: str) -> tuple[str, bytes] | None:
        """Return the media type and the content of a requested file; ``None`` if there is no such file."""
        prefix, name = target[: len(self._prefix)], target[len(self._prefix) :]
        if not hmac.compare_digest(prefix.encode(), self._prefix.encode()):
            return None
        return self._page.files.get(name)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT
    server_version = "memlog"
    sys_version = ""

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815 - http.server's names

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        found = self.server.find(self.path)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        media_type, content = found
        self._begin(HTTPStatus.OK, media_type, len(content))
        self._write(content)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _write(self, content: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - http.server's names
        """Answer with a status only. The error page of http.server would name the server's software."""
        self.close_connection = True
        self.send_response_only(code)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        body = f"{status.phrase}\n".encode()
        self._begin(status, "text/plain; charset=utf-8", len(body))
        self._write(body)

    def _begin(self, status: HTTPStatus, media_type: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(length))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Print nothing: the addresses contain the random part, which must stay secret."""
