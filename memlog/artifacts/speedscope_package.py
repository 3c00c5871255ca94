"""Fetches speedscope's static build: the one place that knows where it comes from and what it must be.

memlog's repository holds none of speedscope's code. It comes as a package of npm's, through npm's own
client, and is what `INTEGRITY` pins or it is nothing. Used when memlog's wheel is built (`hatch_build.py`
loads this file by its path, in an environment that has none of memlog's dependencies) and, where an
install was built without it, when it is first needed. So this imports the standard library alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.25.0"
INTEGRITY = "sha512-cpf9HWTZf1ijLXBJrk87Ve/54tnYx6rlf0gUThvn3ook6h63hLXVOQiMf44PT+XoV503cPfvfiT5gP5vojp6Ag=="
"""Of the tarball, as npm has it: ``npm view speedscope@1.25.0 dist.integrity``."""
INDEX = "index.html"
LICENSES = "LICENSES.txt"
"""speedscope's own licence and those of all that it bundles."""

_OF_OTHERS = Path(__file__).with_name("speedscope_licenses.txt")
_TIMEOUT = 180
"""Seconds."""
_MAX_TARBALL = 8 * 1024**2
_MAX_UNPACKED = 16 * 1024**2
"""Bytes; the build of 1.25.0 has one million."""
_MAX_COMPLAINT = 64 * 1024
_COMPLAINT = re.compile(r"npm (?:error|ERR!)\s+(.+)")
_OWN_LICENSE = "package/LICENSE"
_RELEASE = re.compile(r"package/dist/release/([A-Za-z0-9_][A-Za-z0-9._-]*)")
_UNUSED = re.compile(r"perf-vertx-.*\.txt|jfrview_.*\.wasm")
"""Speedscope's example, and what reads Java's recordings: each is fetched only when it is asked for."""


INSTALL_NPM = "install npm (Debian: apt-get install npm) and try again"
ASK_NPM = "see with `npm ping` whether npm reaches its registry (`npm config get registry`), and try again"


class FetchError(Exception):
    """The build can't be had; one line that says why.

    Attributes:
        remedy: What to do.
    """

    def __init__(self, why: str, remedy: str = ASK_NPM) -> None:
        super().__init__(why)
        self.remedy = remedy


def find_npm() -> str | None:
    """The path of npm's client."""
    return shutil.which("npm")


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds the build. It appears as a whole or not at all."""
    return (folder / INDEX).is_file() and (folder / LICENSES).is_file()


def fetch(target: Path) -> None:
    """Fetches the build and makes it the folder ``target``, whose parent exists.

    Raises:
        FetchError: npm is not there, could not fetch it, or fetched something else.
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
    """Compares a tarball with `INTEGRITY`.

    Raises:
        FetchError: it is another one.
    """
    if tarball.stat().st_size > _MAX_TARBALL:
        raise FetchError(f"npm brought a file that is not speedscope {VERSION}: it is too large")
    digest = hashlib.sha512(tarball.read_bytes()).digest()
    found = f"sha512-{base64.b64encode(digest).decode()}"
    if not hmac.compare_digest(found, INTEGRITY):
        raise FetchError(
            f"npm brought a file that is not speedscope {VERSION}: its hash is {found}"
        )


def extract(tarball: Path, target: Path) -> None:
    """Unpacks the build and collects the licences; nothing is written but plain files in ``target``.

    Raises:
        FetchError: the tarball holds what a package of npm's must not, or lacks something.
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
    """Lets npm's client download the package, which runs nothing of it."""
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
    """The reason that npm gives, of the lines that it wrote: its code, and the line that says most."""
    lines = [
        match[1].strip()
        for line in stderr[:_MAX_COMPLAINT].decode("utf-8", "replace").splitlines()
        if (match := _COMPLAINT.match(line))
    ]
    code = next((line.removeprefix("code ") for line in lines if line.startswith("code ")), "")
    told = [line for line in lines if not line.startswith(("code ", "errno ", "syscall "))]
    why = next((line for line in told if "reason:" in line), told[0] if told else "")
    said = ": ".join(part for part in (code, why[:300]) if part)
    return f": {said}" if said else ""


def _unpack(archive: tarfile.TarFile, target: Path) -> str | None:
    """Writes the build's files, and returns the text of speedscope's own licence."""
    own, total = None, 0
    for member in archive:
        parts = member.name.split("/")
        if not member.isfile() or parts[0] != "package" or ".." in parts:
            raise FetchError(f"speedscope's package holds {member.name!r}, which is not unpacked")
        total += member.size
        if total > _MAX_UNPACKED:
            raise FetchError("speedscope's package is too large")
        match = _RELEASE.fullmatch(member.name)
        if member.name == _OWN_LICENSE:
            own = _content(archive, member).decode("utf-8")
        elif match and not _UNUSED.fullmatch(match[1]):
            # Opened exclusively: a second file of that name would be a trick.
            with (target / match[1]).open("xb") as file:
                file.write(_content(archive, member))
    return own


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise FetchError(f"speedscope's package holds {member.name!r}, which can't be read")
    with file:
        return file.read()


def _move(unpacked: Path, target: Path) -> None:
    try:
        os.rename(unpacked, target)  # noqa: PTH104 - refuses a folder that holds something
    except OSError:
        # Another process was faster, or an incomplete folder is in the way.
        if is_complete(target):
            return
        shutil.rmtree(target, ignore_errors=True)
        os.rename(unpacked, target)  # noqa: PTH104
