"""Fetch speedscope's static build and verify it.

memlog's repository contains no code of speedscope's. npm's client fetches its package, whose hash must be
`INTEGRITY`, when memlog's wheel is built or, if the wheel lacks it, at first use.
The build (`hatch_build.py`) loads this file by its path, in an environment without memlog's dependencies, so
this file imports the standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.25.0"
INTEGRITY = "sha512-cpf9HWTZf1ijLXBJrk87Ve/54tnYx6rlf0gUThvn3ook6h63hLXVOQiMf44PT+XoV503cPfvfiT5gP5vojp6Ag=="
"""Hash of the tarball, as ``npm view speedscope@1.25.0 dist.integrity`` prints it."""
INDEX = "index.html"
LICENSES = "LICENSES.txt"
"""File with the licences of speedscope and of everything that it bundles."""

_OF_OTHERS = Path(__file__).with_name("speedscope_licenses.txt")
_TIMEOUT = 180
"""Seconds."""
_MAX_COMPLAINT = 64 * 1024
"""Bytes of npm's error output that are read."""
_COMPLAINT = re.compile(r"npm (?:error|ERR!)\s+(.+)")
_OWN_LICENSE = "package/LICENSE"
_RELEASE = re.compile(r"package/dist/release/([A-Za-z0-9_][A-Za-z0-9._-]*)")
_UNUSED = re.compile(r"perf-vertx-.*\.txt|jfrview_.*\.wasm")
"""Speedscope's example, and its reader for Java's recordings: the page loads them on demand only."""

INSTALL_NPM = "install npm (Debian: apt-get install npm) and try again"
ASK_NPM = (
    "check with `npm ping` that npm reaches its registry (`npm config get registry`), and try again"
)


class FetchError(Exception):
    """The build can't be fetched; one line with the reason.

    Attributes:
        remedy: What to do.
    """

    def __init__(self, why: str, remedy: str = ASK_NPM) -> None:
        super().__init__(why)
        self.remedy = remedy


def find_npm() -> str | None:
    """Return the path of npm's client; ``None`` if it is not installed."""
    return shutil.which("npm")


def is_complete(folder: Path) -> bool:
    """Return True if ``folder`` contains the build. `fetch` moves it there as a whole."""
    return (folder / INDEX).is_file() and (folder / LICENSES).is_file()


def fetch(target: Path) -> None:
    """Fetch the build into the folder ``target``, whose parent exists.

    Raises:
        FetchError: npm is not installed, failed, or fetched something else.
        OSError: ``target`` can't be written.
    """
    with tempfile.TemporaryDirectory(prefix=".speedscope-", dir=target.parent) as scratch:
        folder = Path(scratch)
        tarball = _pack(folder)
        verify(tarball)
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        extract(tarball, unpacked)
        _move(unpacked, target)


def verify(tarball: Path) -> None:
    """Compare a tarball's hash with `INTEGRITY`.

    Raises:
        FetchError: It differs.
    """
    digest = hashlib.sha512(tarball.read_bytes()).digest()
    found = f"sha512-{base64.b64encode(digest).decode()}"
    if found != INTEGRITY:
        raise FetchError(
            f"npm fetched a file that is not speedscope {VERSION}: its hash is {found}"
        )


def extract(tarball: Path, target: Path) -> None:
    """Unpack the build and collect the licences.

    Args:
        tarball: A package whose hash was compared, so its entries are those of the one package.
        target: Folder for the files.

    Raises:
        FetchError: The tarball is damaged, or lacks the build or its licence.
    """
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            own = _unpack(archive, target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"speedscope's package can't be unpacked: {error}") from error
    if own is None or not (target / INDEX).is_file():
        raise FetchError("speedscope's package lacks its build or its licence")
    texts = [f"speedscope {VERSION}\n\n{own}"]
    texts += [path.read_text("utf-8") for path in sorted(target.glob("*LICENSE*"))]
    texts.append(_OF_OTHERS.read_text("utf-8"))
    (target / LICENSES).write_text("\n\n".join(texts), "utf-8")


def _pack(folder: Path) -> Path:
    """Download the package with npm's client, without running code from it."""
    npm = find_npm()
    if npm is None:
        raise FetchError("npm is not installed", INSTALL_NPM)
    command = [npm, "pack", f"speedscope@{VERSION}", "--ignore-scripts", "--loglevel=error"]
    command += ["--fetch-retries=1", "--fetch-timeout=30000", "--no-update-notifier"]
    try:
        done = subprocess.run(  # noqa: S603 - constants, and the npm that the user has
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FetchError(f"npm failed: {error}") from error
    found = sorted(folder.glob("*.tgz"))
    if done.returncode != 0 or len(found) != 1:
        raise FetchError(
            f"npm could not fetch speedscope {VERSION} (exit {done.returncode}){_reason(done.stderr)}"
        )
    return found[0]


def _reason(stderr: bytes) -> str:
    """Return the reason from npm's error output: its error code, and the most informative line."""
    lines = [
        match[1].strip()
        for line in stderr[:_MAX_COMPLAINT].decode("utf-8", "replace").splitlines()
        if (match := _COMPLAINT.match(line))
    ]
    code = next((line.removeprefix("code ") for line in lines if line.startswith("code ")), "")
    texts = [line for line in lines if not line.startswith(("code ", "errno ", "syscall "))]
    text = next((line for line in texts if "reason:" in line), texts[0] if texts else "")
    reason = ": ".join(part for part in (code, text[:300]) if part)
    return f": {reason}" if reason else ""


def _unpack(archive: tarfile.TarFile, target: Path) -> str | None:
    """Write the build's files, and return the text of speedscope's own licence."""
    own = None
    for member in archive:
        match = _RELEASE.fullmatch(member.name)
        wanted = match is not None and not _UNUSED.fullmatch(match[1])
        file = archive.extractfile(member) if wanted or member.name == _OWN_LICENSE else None
        if file is None:
            continue
        with file:
            if match is None:
                own = file.read().decode("utf-8")
            else:
                (target / match[1]).write_bytes(file.read())
    return own


def _move(unpacked: Path, target: Path) -> None:
    try:
        os.rename(unpacked, target)  # noqa: PTH104 - fails if the target is a folder that is not empty
    except OSError:
        # Another process was faster, or an incomplete folder exists.
        if is_complete(target):
            return
        shutil.rmtree(target, ignore_errors=True)
        os.rename(unpacked, target)  # noqa: PTH104
