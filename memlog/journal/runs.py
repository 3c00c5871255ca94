"""Runs as folders: making, finding and listing them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from memlog.errors import RunNotFoundError, UnwritableDirectoryError
from memlog.journal.format import Header, ProcessIdentity, parse_segment_name
from memlog.journal.process_identity import Birth, birth_of
from memlog.journal.reader import JournalFile

logger = logging.getLogger("memlog")

LATEST = "latest"
_ALPHABET = (
    "abcdefghijkmnpqrstuvwxyz23456789"  # 32 of them; no l, o, 0, 1: ids are read aloud and typed
)
_ID_LENGTH = 8
_FOREIGN_SILENCE = 120.0
"""Seconds without a write after which a run on another machine counts as gone."""
_CLOCK_TOLERANCE = 2.0
"""Seconds by which the system's figure for a process's start may wander."""


class RunDirectory:
    """A run's folder.

    Attributes:
        id: The run's id, which is the folder's name.
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.name
        self.path = path

    @property
    def delivery(self) -> Path:
        """The folder in which uploaders keep how far they got."""
        return self.path / "delivery"

    @property
    def artifacts(self) -> Path:
        """The folder of the files that were kept for the run; made when the first one is."""
        return self.path / "artifacts"

    @property
    def worst_step(self) -> Path:
        """The events of the traced step that needed most memory, in place of an earlier one's."""
        return self.path / "worst-step.msgpack"

    def files(self) -> list[JournalFile]:
        """One reader for each process that wrote here, the trainer's first."""
        processes = {process for process, _ in _segments(self.path)}
        ordered = sorted(
            processes, key=lambda process: (not process.startswith("trainer"), process)
        )
        return [JournalFile(self.path, process) for process in ordered]

    def trainer(self) -> Header | None:
        """The header of the trainer's journal; ``None`` where there is none that can be read."""
        for file in self.files():
            if file.process.startswith("trainer"):
                return next(file.headers(), None)
        return None

    def begun(self) -> float:
        """Unix time in seconds at which the run began."""
        header = self.trainer()
        return header.begun_us / 1e6 if header else self.last_write()

    def last_write(self) -> float:
        """Unix time in seconds of the newest change to the journal."""
        times = [path.lstat().st_mtime for path in self.path.glob("*.jsonl")]
        return max(times, default=self.path.stat().st_mtime)

    def is_alive(self) -> bool:
        """Whether the trainer's process still lives, and runs the program that began the run.

        On another machine nobody can tell, nor where the system hides other users' processes; there a run
        that wrote within the last two minutes counts as alive.
        """
        header = self.trainer()
        if header is None:
            return False
        if header.process.host == os.uname().nodename:
            with suppress(PermissionError):
                return _lives(header.process)
        return time.time() - self.last_write() < _FOREIGN_SILENCE

    def was_replaced(self) -> bool:
        """Whether the trainer's process lives, and has put another program in its place (``exec``)."""
        header = self.trainer()
        if header is None or header.process.ticks is None:
            return False
        try:
            found = birth_of(header.process.pid)
        except OSError:
            return False
        return found.ticks == header.process.ticks and _runs_another(header.process, found)


def _lives(process: ProcessIdentity) -> bool:
    if process.ticks is None or process.boot is None:
        return _lives_by_the_clock(process)
    try:
        found = birth_of(process.pid)
    except ProcessLookupError:
        return False
    same = (found.boot, found.ticks) == (process.boot, process.ticks)
    return same and not _runs_another(process, found)


def _runs_another(process: ProcessIdentity, found: Birth) -> bool:
    """Whether a process has put another program in its place, as far as can be seen."""
    return None not in (process.program, found.program) and process.program != found.program


def _lives_by_the_clock(process: ProcessIdentity) -> bool:
    """Off Linux, and where a journal does not name the kernel's own figures, as the first ones did not."""
    import psutil  # noqa: PLC0415 - 9 ms that a trainer need not spend

    try:
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.started) < _CLOCK_TOLERANCE
        return same and found.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):  # the last two: no process has such a number
        return False


def new_run(root: Path) -> RunDirectory:
    """Makes the folder of a new run below ``root``.

    Raises:
        UnwritableDirectoryError: it can't be made.
    """
    run_id = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(_ID_LENGTH))
    path = root / run_id
    try:
        with suppress(FileExistsError):  # there already, or another rank was first just now
            root.mkdir(parents=True)
            # Only in a folder of memlog's own making: in the user's it would hide the user's files.
            (root / ".gitignore").write_text("# Runs that memlog recorded: not source.\n*\n")
        path.mkdir()
        (path / "delivery").mkdir()
    except OSError as error:
        raise UnwritableDirectoryError(
            f"can't make a folder for the run in {root}: {error.strerror}; "
            "pass dir=… or set MEMLOG_DIR to a folder that can be written"
        ) from error
    return RunDirectory(path)


def _segments(path: Path) -> Iterator[tuple[str, int]]:
    """Process and number of each segment in a folder; what is no plain file is none."""
    with os.scandir(path) as entries:
        for entry in entries:
            found = parse_segment_name(entry.name)
            if found is not None and entry.is_file(follow_symlinks=False):
                yield found


def list_runs(root: Path) -> list[RunDirectory]:
    """The runs below ``root``, oldest first; one that can't be read is said, and costs itself alone."""
    if not root.is_dir():
        return []
    runs = []
    for path in root.iterdir():
        run = RunDirectory(path)
        try:
            path.name.encode()  # what is no UTF-8 can be told to no program
            if path.is_dir() and any(_segments(path)):
                runs.append((run.begun(), run.id, run))
        except Exception as error:  # noqa: BLE001 - whatever stands there, the other runs are listed
            logger.warning("memlog: %s is left out, since it can't be read: %s", path, error)
    return [run for _, _, run in sorted(runs, key=lambda known: known[:2])]


def find_run(root: Path, name: str) -> RunDirectory:
    """The run called ``name``: its id, the unique beginning of one, or ``latest``.

    Raises:
        RunNotFoundError: there is none, or more than one.
    """
    runs = list_runs(root)
    if not runs:
        raise RunNotFoundError(
            f"there are no runs in {root}: train with memlog.init(), or name the folder with --dir or "
            "MEMLOG_DIR"
        )
    if not name:
        raise RunNotFoundError(
            f"no run is named: pass an id, the beginning of one, or {LATEST!r}; `memlog runs` lists them"
        )
    if name == LATEST:
        return runs[-1]
    found = [run for run in runs if run.id == name] or [r for r in runs if r.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunNotFoundError(f"no run in {root} begins with {name!r}: `memlog runs` lists them")
    raise RunNotFoundError(
        f"{len(found)} runs begin with {name!r} ({', '.join(run.id for run in found[:5])}): "
        "name more of the id"
    )
