"""Download files from an untrusted store into one folder, and write nowhere else."""

from __future__ import annotations

import filecmp
import itertools
import os
import re
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.terminal import format_bytes
from memlog.errors import ArtifactError, TrackerUnavailableError, UnknownRunError
from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import open_artifact
from memlog.sink import ArtifactStore, StoredArtifact

MAX_FILES = 5000
MAX_FILE_BYTES = 8 * 1024**3
_SLACK = 64 * 1024**2
"""Bytes by which a downloaded file may be larger than the size in the store's list. A store may list the size
of the original file and compress the file afterwards."""

PullOutcome: TypeAlias = Literal["written", "same", "replaced"]


class Pulled(msgspec.Struct, frozen=True):
    artifact: StoredArtifact
    path: Path
    size: int
    outcome: PullOutcome
    """Result of the download.

    ``written``: a new file was created. ``replaced``: the download replaced an existing file. ``same``: the
    folder already had a file with this name and content, and that file was not changed."""


class Choice(msgspec.Struct, frozen=True):
    """Files that a store lists: those to download, and those that memlog refuses."""

    files: list[StoredArtifact]
    refused: list[str]
    """Names of the files that memlog refuses, because their name or kind is not safe in a path (`is_safe`).
    memlog itself makes only safe names and kinds."""

    @property
    def size(self) -> int | None:
        """Bytes of all files to download; ``None`` if the size of one of them is unknown."""
        sizes = [file.size for file in self.files if file.size is not None]
        return sum(sizes) if len(sizes) == len(self.files) else None


def choose(listed: Sequence[StoredArtifact], kind: str | None) -> Choice:
    """Choose the files to download: those of one kind, or all files if ``kind`` is ``None``.

    Raises:
        ArtifactError: More than `MAX_FILES` files are chosen, or one of them has more than `MAX_FILE_BYTES`.
    """
    wanted = {(file.name, file.kind): file for file in listed if kind in {None, file.kind}}
    files = [file for file in wanted.values() if is_safe(file.name) and is_safe(file.kind)]
    if len(files) > MAX_FILES:
        raise ArtifactError(
            f"there are {len(files):,} files, and a pull fetches at most {MAX_FILES:,}: choose with --kind"
        )
    for file in files:
        if file.size is not None and file.size > MAX_FILE_BYTES:
            raise ArtifactError(
                f"{file.name!r} has {format_bytes(file.size)}, and a pull fetches files of at most "
                f"{format_bytes(MAX_FILE_BYTES)}: fetch it with the tracker's own client"
            )
    taken = set(files)
    return Choice(files, [file.name for file in wanted.values() if file not in taken])


class Puller:
    """Downloader of files into one folder. Each file is first downloaded to a temporary folder.

    If ``force`` is true, a download replaces an existing file. Otherwise, if an existing file has the same
    name and another content, the download gets a name with a number, such as ``a-1.json``.
    """

    def __init__(
        self, store: ArtifactStore, run_id: str, directory: Path, *, force: bool = False
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._directory = directory
        self._force = force
        self._taken: set[str] = set()

    def room_for(self, size: int | None) -> None:
        """Create the folder, and check that its disk has room for ``size`` more bytes (``None``: unknown).

        Raises:
            ArtifactError: The disk does not have enough room.
            OSError: The folder can't be created.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory).free
        if size is not None and size > free:
            raise ArtifactError(
                f"the files have {format_bytes(size)}, and the disk of {self._directory} has room for "
                f"{format_bytes(free)}: choose fewer files with --kind, or another folder with -o"
            )

    def pull(self, artifact: StoredArtifact, progress: Callable[[int], object]) -> Pulled:
        """Download one of the files that `choose` returned.

        ``progress`` is called with the number of new bytes each time that data arrives.

        Raises:
            ArtifactError: The download is too large, is not a plain file, or would replace a folder.
            DeliveryError: The tracker fails.
        """
        limit = MAX_FILE_BYTES if artifact.size is None else artifact.size + _SLACK
        with tempfile.TemporaryDirectory(prefix=".memlog-pull-", dir=self._directory) as scratch:
            folder = Path(scratch)
            with _file_limit(limit):
                came = self._store.fetch(
                    self._run_id, artifact, folder, _bounded(progress, artifact, limit)
                )
            size = _size_of(came, folder, artifact)
            return self._put(artifact, came, size)

    def _put(self, artifact: StoredArtifact, came: Path, size: int) -> Pulled:
        for name in numbered(artifact.name):
            target = self._directory / name
            if self._force and name not in self._taken:
                outcome = _replace(came, target)
            elif name not in self._taken and _is_same(came, target):
                outcome = "same"
            elif not _create(came, target):
                continue
            else:
                outcome = "written"
            self._taken.add(name)
            return Pulled(artifact, target, size, outcome)
        raise AssertionError  # never reached: `numbered` yields names without end


def _bounded(
    progress: Callable[[int], object], artifact: StoredArtifact, limit: int
) -> Callable[[int], object]:
    """Return a ``progress`` that raises if more than ``limit`` bytes arrive."""
    arrived = 0

    def report(count: int) -> None:
        nonlocal arrived
        arrived += count
        if arrived > limit:
            raise ArtifactError(
                f"{artifact.name!r} is larger than the tracker lists ({format_bytes(artifact.size)}): "
                "it is not kept"
            )
        progress(count)

    return report


@contextmanager
def _file_limit(size: int) -> Iterator[None]:
    """Set a maximum size for each file that this process writes (RLIMIT_FSIZE).

    The maximum is ``size`` or `_SLACK` bytes, whichever is larger. The check in `_bounded` is not enough,
    because the clients of some trackers do not call ``progress``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    allowed = max(size, _SLACK) + 1
    lower = [bound for bound in (allowed, soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(lower), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _size_of(came: Path, folder: Path, artifact: StoredArtifact) -> int:
    """Return the size of a download in bytes. Raise if the download is no plain file inside ``folder``."""
    found = came.lstat()
    inside = came.parent.resolve().is_relative_to(folder.resolve())
    if not stat.S_ISREG(found.st_mode) or not inside:
        raise ArtifactError(f"the download of {artifact.name!r} is no plain file: it is not kept")
    return found.st_size


def _is_same(came: Path, target: Path) -> bool:
    """Return True if ``target`` is a plain file (and no link) with the same content as ``came``."""
    return not target.is_symlink() and target.is_file() and filecmp.cmp(came, target, shallow=False)


def _create(came: Path, target: Path) -> bool:
    """Move a file to ``target``; return False if ``target`` exists."""
    try:
        # Create `target` exclusively first. A rename alone would replace a file that another process has just
        # created there.
        target.touch(exist_ok=False)
    except FileExistsError:
        return False
    came.replace(target)
    return True


def _replace(came: Path, target: Path) -> PullOutcome:
    if target.is_dir() and not target.is_symlink():
        raise ArtifactError(
            f"{target} is a folder, and --force replaces files only: choose another folder with -o"
        )
    outcome: PullOutcome = "replaced" if os.path.lexists(target) else "written"
    came.replace(target)  # replaces a link itself, not the file that it points at
    return outcome


_CHUNK = 1024**2


class JournalStore:
    """A `memlog.sink.ArtifactStore` over one run's folder."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._events: list[Artifact] | None = None

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the run's files, the newest last, including files that are missing from the folder.

        Raises:
            UnknownRunError: ``run_id`` is another run's id.
            TrackerUnavailableError: The run's folder does not exist.
        """
        if run_id != self._run.id:
            raise UnknownRunError(f"{self._run.path} is run {self._run.id} and not {run_id!r}")
        self._require_folder()
        self._events = kept(self._run)
        return [StoredArtifact(event.name, event.kind, event.size) for event in self._events]

    def fetch(
        self,
        run_id: str,  # noqa: ARG002 - this store has one run
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        self._require_folder()
        events = kept(self._run) if self._events is None else self._events
        wanted = (artifact.name, artifact.kind)
        event = next((event for event in events if (event.name, event.kind) == wanted), None)
        if event is None:
            raise ArtifactError(f"run {self._run.id} has kept no file {artifact.name!r}")
        source = open_artifact(self._run, event)
        if source is None:
            raise ArtifactError(
                f"{event.name!r} is no longer in {self._run.path}: pass a tracker that has it with --backend"
            )
        target = directory / event.name
        with source as file, target.open("xb") as copy:
            while chunk := file.read(_CHUNK):
                copy.write(chunk)
                progress(len(chunk))
        return target

    def _require_folder(self) -> None:
        if not self._run.path.is_dir():
            raise TrackerUnavailableError(
                f"{self._run.path} does not exist: check that its disk is mounted"
            )


def kept(run: RunDirectory) -> list[Artifact]:
    """Return the artifacts in the journal, the newest last.

    If several artifacts have the same name, only the newest of them is returned.
    """
    events = [
        entry.event
        for file in run.files()
        for entry in file.read(complete=True)
        if isinstance(entry.event, Artifact)
    ]
    newest: dict[str, Artifact] = {}
    for event in sorted(events, key=lambda event: event.time_us):
        newest.pop(event.name, None)
        newest[event.name] = event
    return list(newest.values())


_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Pattern of safe file names: no path separator, no leading dot, no control character. All file names that
memlog makes match this pattern."""


def is_safe(name: str) -> bool:
    return bool(_SAFE.fullmatch(name))


def numbered(name: str) -> Iterator[str]:
    """Yield ``name``, then numbered names without end: ``a.json``, ``a-1.json``, ``a-2.json``, …."""
    yield name
    stem, dot, endings = name.partition(".")
    for number in itertools.count(1):
        yield f"{stem}-{number}{dot}{endings}"
