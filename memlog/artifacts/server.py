"""Pages that show flame graphs and snapshots in a browser, served on loopback to this user only.

Speedscope's page checks nothing. If a file has a fault that this module finds, the page would only show
"something went wrong". Speedscope's JSON schema finds few of these faults.

For the unit ``bytes``, speedscope writes "MB" for 1024² bytes, but places the ticks of its scale at decimal
numbers of bytes. For example, the label of the tick at 10,000,000 bytes is 9.54 MB. If numbers have no unit,
speedscope does not convert them. So memlog converts the numbers to MiB, removes the unit, and adds "in MiB"
to the profile's name. Only speedscope's page gets the converted numbers. The file on the disk stays the same.

The files are in memory and found by their exact address, so no address leads to another file. Each address
begins with a random part, so other users of the machine can't request the files. The ``Host`` header of a
request must name this machine. Otherwise another web site could make its own host name point to this server
and read the files (DNS rebinding). A Content-Security-Policy lets the page connect to this server only.
"""

from __future__ import annotations

import hmac
import itertools
import math
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from memlog._internal.npm_package import SPEEDSCOPE, FetchError, cache_directory
from memlog._internal.terminal import MIB
from memlog.artifacts.snapshots import PICKLE, parse_snapshot, read_content
from memlog.errors import UnopenableFileError, ViewerUnavailableError
from memlog.trace import exporters
from memlog.trace.exporters.profiles import SCHEMA

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

SpeedscopeUnit: TypeAlias = Literal[
    "none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"
]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Head(msgspec.Struct):
    schema: str | None = msgspec.field(name="$schema", default=None)


class _Frame(msgspec.Struct):
    name: str
    file: str | None = None
    line: float | None = None
    col: float | None = None


class _Shared(msgspec.Struct):
    frames: list[_Frame]


class _Sampled(msgspec.Struct, tag="sampled", rename="camel"):
    name: str
    unit: SpeedscopeUnit
    start_value: float
    end_value: float
    samples: list[list[Index]]
    weights: list[Annotated[float, msgspec.Meta(ge=0)]]

    def problem(self, frames: int) -> str | None:
        if len(self.samples) != len(self.weights):
            return f"it has {len(self.samples):,} samples and {len(self.weights):,} weights"
        highest = max(itertools.chain.from_iterable(self.samples), default=-1)
        return _out_of_range(highest) if highest >= frames else None


class _Change(msgspec.Struct):
    type: Literal["O", "C"]
    at: float
    frame: Index


class _Evented(msgspec.Struct, tag="evented", rename="camel"):
    name: str
    unit: SpeedscopeUnit
    start_value: float
    end_value: float
    events: list[_Change]

    def problem(self, frames: int) -> str | None:
        open_frames: list[int] = []
        before = -math.inf
        for number, event in enumerate(self.events):
            if event.frame >= frames:
                return _out_of_range(event.frame)
            if event.at < before:
                return f"event {number:,} goes back in time"
            before = event.at
            if event.type == "O":
                open_frames.append(event.frame)
            elif not open_frames or open_frames.pop() != event.frame:
                return f"event {number:,} closes a frame that is not the innermost one"
        return f"{len(open_frames):,} frames are never closed" if open_frames else None


class _File(msgspec.Struct, rename="camel"):
    shared: _Shared
    profiles: list[_Sampled | _Evented]
    active_profile_index: int | None = None


def is_flamegraph(content: bytes) -> bool:
    """Return True if the content names speedscope's ``$schema``, even if other parts are damaged."""
    try:
        return msgspec.json.decode(content, type=_Head).schema == SCHEMA
    except _UNDECODABLE:
        return content.lstrip()[:1] == b"{" and SCHEMA.encode() in content


def check_flamegraph(content: bytes) -> None:
    """Check a file for all faults that break speedscope's page.

    Raises:
        UnopenableFileError: The page would fail to load the file, or would show nothing.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except _UNDECODABLE as error:
        raise UnopenableFileError(f"it is damaged: {error}") from error
    if not file.profiles:
        raise UnopenableFileError("it has no profile")
    active = file.active_profile_index
    if active is not None and not 0 <= active < len(file.profiles):
        raise UnopenableFileError(f"it selects profile {active}, which it lacks")
    for number, profile in enumerate(file.profiles, 1):
        # A name from the file may be long, and may contain control characters of a terminal.
        label = f"profile {number} ({profile.name[:60]!r})"
        if profile.start_value <= profile.end_value:
            problem = profile.problem(len(file.shared.frames))
        else:
            problem = f"it ends ({profile.end_value:g}) before it begins ({profile.start_value:g})"
        if problem is not None:
            raise UnopenableFileError(f"{label}: {problem}")


def _out_of_range(index: int) -> str:
    return f"it names frame {index:,}, which the file lacks"


_KIB = 1024


def in_binary_units(content: bytes, title: str) -> bytes:
    """Return a file with its profiles converted from bytes to MiB.

    A profile of less than 1 MiB is converted to KiB. A profile of less than 1 KiB is not converted. A file
    without a title gets ``title``. `memlog.artifacts.server.check_flamegraph` must have accepted ``content``.
    """
    try:
        document = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return content  # a field that speedscope ignores has a number that is too large
    document["name"] = document.get("name") or title
    document["profiles"] = [_scaled(profile) for profile in document["profiles"]]
    return msgspec.json.encode(document)


def _scaled(profile: dict[str, Any]) -> dict[str, Any]:
    span = profile["endValue"] - profile["startValue"]
    if profile["unit"] != "bytes" or span < _KIB:
        return profile
    divisor, unit = (MIB, "MiB") if span >= MIB else (_KIB, "KiB")
    # Division by a power of two is exact.
    scaled = {
        **profile,
        "name": f"{profile['name']} (in {unit})",
        "unit": "none",
        "startValue": profile["startValue"] / divisor,
        "endValue": profile["endValue"] / divisor,
    }
    if profile["type"] == "sampled":
        scaled["weights"] = [weight / divisor for weight in profile["weights"]]
    else:
        scaled["events"] = [{**event, "at": event["at"] / divisor} for event in profile["events"]]
    return scaled


def find_viewer(announce: Callable[[str], object]) -> Path:
    """Return the folder of speedscope's static build.

    If neither this install nor the user's cache contains the build, npm fetches it. Before that, ``announce``
    is called with one line of text.

    Raises:
        ViewerUnavailableError: The build was not found and can't be fetched. The message says why, and what
            to do.
    """
    try:
        found = SPEEDSCOPE.find(announce)
    except FetchError as error:
        raise ViewerUnavailableError(f"({error}): {error.remedy}") from error
    except OSError as error:
        why = f"({cache_directory()}: {error.strerror or error})"
        raise ViewerUnavailableError(
            f"{why}: set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    assert found is not None  # noqa: S101 - it is fetched if it is missing
    return found


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
    elif not is_flamegraph(content):
        if content.lstrip()[:1] in (b"{", b"[") and b'"ph"' in content:
            raise UnopenableFileError(
                f"{path} is a trace in Chrome's format: open it at https://ui.perfetto.dev"
            )
        raise UnopenableFileError(f"{path} can't be shown: memlog opens {_KINDS}")
    try:
        check_flamegraph(content)
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
    return _is_snapshot(content) or is_flamegraph(content)


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
