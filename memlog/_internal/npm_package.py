"""Fetch the browser libraries that memlog's pages use, through npm's client, and verify them.

memlog's repository contains no code of these libraries. npm's client fetches each package when memlog's wheel
is built or, if the wheel lacks it, at first use. The package's hash must be the pinned one. The build
(`hatch_build.py`) loads this file by its path, in an environment without memlog's dependencies, so this file
imports the standard library only.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LICENSES = "LICENSES.txt"
"""File with the licences of a library and of everything that it bundles."""

_MEMLOG = Path(__file__).parents[1]
_TIMEOUT = 180
"""Maximum seconds that npm may take to download a package."""
_MAX_COMPLAINT = 64 * 1024
"""Maximum bytes of npm's error output that are searched for the reason of a failure."""
_COMPLAINT = re.compile(r"npm (?:error|ERR!)\s+(.+)")
_OWN_LICENSE = "package/LICENSE"

INSTALL_NPM = "install npm (Debian: apt-get install npm) and try again"
ASK_NPM = (
    "check with `npm ping` that npm reaches its registry (`npm config get registry`), and try again"
)


class FetchError(Exception):
    """A package can't be fetched. The message is one line with the reason; ``remedy`` says what to do."""

    def __init__(self, why: str, remedy: str = ASK_NPM) -> None:
        super().__init__(why)
        self.remedy = remedy


def cache_directory() -> Path:
    """Return memlog's folder in the user's cache, by the XDG base directory specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification says to ignore a relative path. Such a path leads into the working directory, where
    # other users may have files.
    root = named if named.is_absolute() else Path.home() / ".cache"
    return root / "memlog"


@dataclass(frozen=True)
class NpmPackage:
    """A package of npm's registry. memlog uses some of the package's files."""

    name: str
    """Name in the registry and in messages."""
    version: str
    integrity: str
    """Hash of the tarball, as ``npm view NAME@VERSION dist.integrity`` prints it."""
    files: re.Pattern[str]
    """Pattern of the wanted files' paths in the tarball. The first group matches the unpacked file's name."""
    needed: str
    """Name of an unpacked file without which the package is incomplete."""
    installed: Path | None = None
    """Folder of the files in memlog's wheel; ``None``: the wheel has none."""
    other_licenses: Path | None = None
    """File with the licences of libraries that the package bundles."""

    def find(self, announce: Callable[[str], object] | None) -> Path | None:
        """Return the folder of the files: in this install, in the user's cache, or fetched by npm.

        Args:
            announce: Function called with one line before npm fetches the package. ``None``: do not fetch the
                package, and return ``None`` if it is missing.

        Raises:
            FetchError: npm is not installed, npm failed, or the fetched package is not the expected one.
            OSError: The cache can't be written.
        """
        cached = cache_directory() / f"{self.name}-{self.version}"
        for folder in (self.installed, cached):
            if folder is not None and self.is_complete(folder):
                return folder
        if announce is None:
            return None
        if shutil.which("npm") is not None:
            announce(f"fetching {self.name} {self.version} with npm into {cached.parent}, once")
        cached.parent.mkdir(parents=True, exist_ok=True)
        self.fetch(cached)
        return cached

    def is_complete(self, folder: Path) -> bool:
        """Return True if ``folder`` has the file `needed` and the file with the licences.

        A folder with these two has all files, because `fetch` moves the whole folder at once.
        """
        return (folder / self.needed).is_file() and (folder / LICENSES).is_file()

    def fetch(self, target: Path) -> None:
        """Fetch the files into the folder ``target``, whose parent exists.

        Raises:
            FetchError: npm is not installed, npm failed, or the fetched package is not the expected one.
            OSError: ``target`` can't be written.
        """
        with tempfile.TemporaryDirectory(prefix=f".{self.name}-", dir=target.parent) as scratch:
            folder = Path(scratch)
            tarball = self._pack(folder)
            self._verify(tarball)
            unpacked = folder / "unpacked"
            unpacked.mkdir()
            self.extract(tarball, unpacked)
            self._move(unpacked, target)

    def _verify(self, tarball: Path) -> None:
        """Raise `FetchError` if a tarball's hash is not `integrity`."""
        digest = hashlib.sha512(tarball.read_bytes()).digest()
        actual = f"sha512-{base64.b64encode(digest).decode()}"
        if actual != self.integrity:
            raise FetchError(
                f"npm fetched a file that is not {self.name} {self.version}, so memlog does not use it "
                f"(its hash is {actual})",
                "check which registry npm uses (`npm config get registry`)",
            )

    def extract(self, tarball: Path, target: Path) -> None:
        """Unpack the wanted files into the folder ``target``, and collect the licences.

        `_verify` must have accepted ``tarball``: its content and the names of its entries are trusted.

        Raises:
            FetchError: The tarball lacks a needed file or the licence.
            OSError: ``target`` can't be written.
        """
        with tarfile.open(tarball, "r:gz") as archive:
            own = self._unpack(archive, target)
        if own is None or not (target / self.needed).is_file():
            raise FetchError(f"{self.name}'s package lacks its build or its licence")
        texts = [f"{self.name} {self.version}\n\n{own}"]
        texts += [path.read_text("utf-8") for path in sorted(target.glob("*LICENSE*"))]
        if self.other_licenses is not None:
            texts.append(self.other_licenses.read_text("utf-8"))
        (target / LICENSES).write_text("\n\n".join(texts), "utf-8")

    def _pack(self, folder: Path) -> Path:
        """Let npm download the package's tarball. The package's scripts do not run."""
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError("npm is not installed", INSTALL_NPM)
        command = [
            *(npm, "pack", f"{self.name}@{self.version}", "--ignore-scripts", "--loglevel=error"),
            *("--fetch-retries=1", "--fetch-timeout=30000", "--no-update-notifier"),
        ]
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
        # npm chooses the tarball's name.
        tarballs = sorted(folder.glob("*.tgz"))
        if done.returncode != 0 or len(tarballs) != 1:
            raise FetchError(
                f"npm could not fetch {self.name} {self.version} (exit {done.returncode})"
                f"{_reason(done.stderr)}"
            )
        return tarballs[0]

    def _unpack(self, archive: tarfile.TarFile, target: Path) -> str | None:
        """Write the wanted files, and return the text of the package's own licence."""
        own = None
        for member in archive:
            match = self.files.fullmatch(member.name)
            wanted = match is not None or member.name == _OWN_LICENSE
            file = archive.extractfile(member) if wanted else None
            if file is None:
                continue
            with file:
                if match is None:
                    own = file.read().decode("utf-8")
                else:
                    (target / match[1]).write_bytes(file.read())
        return own

    def _move(self, unpacked: Path, target: Path) -> None:
        try:
            os.rename(unpacked, target)  # noqa: PTH104 - fails if the target is a folder that is not empty
        except OSError:
            # Another process was faster, or an incomplete folder exists.
            if self.is_complete(target):
                return
            shutil.rmtree(target, ignore_errors=True)
            os.rename(unpacked, target)  # noqa: PTH104


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


SPEEDSCOPE = NpmPackage(
    name="speedscope",
    version="1.25.0",
    integrity="sha512-cpf9HWTZf1ijLXBJrk87Ve/54tnYx6rlf0gUThvn3ook6h63hLXVOQiMf44PT+XoV503cPfvfiT5gP5vojp6Ag==",
    # Without the example and the reader for Java's recordings, which the page would load only on demand.
    files=re.compile(
        r"package/dist/release/((?!perf-vertx-.*\.txt$|jfrview_.*\.wasm$)[A-Za-z0-9_][A-Za-z0-9._-]*)"
    ),
    needed="index.html",
    installed=_MEMLOG / "artifacts" / "_speedscope",
    other_licenses=_MEMLOG / "artifacts" / "speedscope_licenses.txt",
)
"""The viewer of flame graphs, which ``memlog open`` serves."""

UPLOT = NpmPackage(
    name="uplot",
    version="1.6.32",
    integrity="sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
    files=re.compile(r"package/dist/(uPlot\.iife\.min\.js|uPlot\.min\.css)"),
    needed="uPlot.iife.min.js",
    installed=_MEMLOG / "reports" / "page" / "_uplot",
)
"""The library that draws the report's charts."""

PACKAGES = (SPEEDSCOPE, UPLOT)
