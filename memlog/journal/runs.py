"""Make, find and list the folders of runs, and read a run's journal while it is written."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from memlog._internal.diagnostics import warn
from memlog.errors import (
    AmbiguousRunError,
    ConfigurationError,
    RunNotFoundError,
    UnwritableDirectoryError,
)
from memlog.events import End, Event, RankFailure
from memlog.journal.format import START, Header, Position, ProcessIdentity, Role, birth_of
from memlog.journal.reader import JournalFile, segments_in
from memlog.settings import runs_directory

LATEST = "latest"
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # 32; without l, o, 0, 1, for people who type an id
_ID_LENGTH = 8
_CANDIDATES = 5
"""Maximum number of runs that a message lists if several match a name."""
_MAX_IDLE_ON_ANOTHER_HOST = 120.0
"""Seconds without a write after which a run on another machine counts as ended."""
_CLOCK_TOLERANCE = 2.0
"""If two readings of a process's start time differ by fewer seconds than this, they count as equal."""


class RunDirectory:
    """A run's folder. Its name is the run's ``id``."""

    def __init__(self, path: Path) -> None:
        self.id = path.name
        self.path = path

    @property
    def delivery(self) -> Path:
        """Folder of the uploaders' saved states."""
        return self.path / "delivery"

    @property
    def artifacts(self) -> Path:
        """Folder of the run's artifacts; made together with the first artifact."""
        return self.path / "artifacts"

    @property
    def worst_step(self) -> Path:
        """File with the allocation events of the traced step that needed most memory so far."""
        return self.path / "worst-step.msgpack"

    def command(self, name: str) -> str:
        """Return the line that calls a command with this run, as in ``memlog sync k7m2xq9a``.

        The line has the option ``--dir`` if the command would not find the run without this option.
        """
        line = f"memlog {name} {self.id}"
        try:
            root = self.path.absolute().parent
            is_default = runs_directory().resolve() == root.resolve()
        except (OSError, RuntimeError, ConfigurationError):
            is_default = False
        return line if is_default else f"{line} --dir {shlex.quote(str(self.path.parent))}"

    def files(self, role: Role | None = None) -> list[JournalFile]:
        """Return a reader for each process, the trainer's first. If ``role`` is given, skip other roles."""
        names = {name for name, _ in segments_in(self.path) if name.startswith(role or "")}
        ordered = sorted(names, key=lambda name: (not name.startswith("trainer"), name))
        return [JournalFile(self.path, process) for process in ordered]

    def events(self, role: Role | None = None) -> Iterator[Event]:
        """Yield the events in the journal, one process after the other; ``role`` as in `files`."""
        for file in self.files(role):
            for entry in file.read():
                yield entry.event

    def trainer(self) -> Header | None:
        """Return the first header that the trainer wrote; ``None`` if none can be read."""
        return next((next(file.headers(), None) for file in self.files("trainer")), None)

    def begun(self) -> float:
        """Return the time at which the run began, Unix time in seconds."""
        header = self.trainer()
        return header.begun_us / 1e6 if header else self.last_write()

    def last_write(self) -> float:
        """Return the time of the newest change to the journal, Unix time in seconds."""
        times = (file.last_write() for file in self.files())
        return max((time for time in times if time is not None), default=self.path.stat().st_mtime)

    def end(self) -> End | None:
        """Return the event of the run's end; ``None`` if it is not in the journal's last segments."""
        # The trainer's file comes first. The helper process writes the end if the trainer could not.
        for file in self.files():
            end = file.first_end(max(file.segments, default=1) - 1)
            if end is not None:
                return end
        return None

    def rank_failure(self) -> RankFailure | None:
        """Return the bad end of the training with several ranks; ``None`` if the journal does not tell it."""
        failure: RankFailure | None = None
        for file in self.files("ranks"):
            last = max(file.segments, default=1)
            for entry in file.read(Position(last - 1, 0)):
                if isinstance(entry.event, RankFailure):
                    failure = entry.event
        return failure

    def is_alive(self) -> bool:
        """Return True if the training process lives.

        memlog sees no processes on other machines, and on some systems no processes of other users. In these
        cases, the run counts as alive if its journal has changed within the last two minutes.
        """
        header = self.trainer()
        if header is None:
            return False
        if header.process.host == os.uname().nodename:
            with suppress(PermissionError):
                return _lives(header.process)
        return time.time() - self.last_write() < _MAX_IDLE_ON_ANOTHER_HOST


def _lives(process: ProcessIdentity) -> bool:
    if process.ticks is None or process.boot is None:
        return _lives_by_the_clock(process)
    try:
        birth = birth_of(process.pid)
    except ProcessLookupError:
        return False
    return (birth.boot, birth.ticks) == (process.boot, process.ticks)


def _lives_by_the_clock(process: ProcessIdentity) -> bool:
    """Return True if the process lives, judged by its start time.

    Used outside Linux, and for old journals, which lack ``ticks`` and ``boot``.
    """
    import psutil  # noqa: PLC0415 - 9 ms that a trainer need not spend

    try:
        candidate = psutil.Process(process.pid)
        same = abs(candidate.create_time() - process.started) < _CLOCK_TOLERANCE
        return same and candidate.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):  # the last two: the pid is no valid one
        return False


def new_run(root: Path) -> RunDirectory:
    """Make the folder of a new run below ``root``.

    Raises:
        UnwritableDirectoryError: The folder can't be made.
    """
    run_id = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(_ID_LENGTH))
    path = root / run_id
    try:
        with suppress(FileExistsError):  # the folder exists, or another rank makes it now
            root.mkdir(parents=True)
            # Only in a folder that memlog made. In the user's own folder, it would hide files from git.
            (root / ".gitignore").write_text("# Runs that memlog recorded: not source.\n*\n")
        path.mkdir()
        (path / "delivery").mkdir()
    except OSError as error:
        raise UnwritableDirectoryError(
            f"can't make a folder for the run in {root}: {error.strerror}; "
            "pass dir=… or set MEMLOG_DIR to a folder that can be written"
        ) from error
    return RunDirectory(path)


def list_runs(root: Path) -> list[RunDirectory]:
    """Return the runs below ``root``, oldest first; log a warning for each that can't be read."""
    if not root.is_dir():
        return []
    runs = []
    for path in root.iterdir():
        run = RunDirectory(path)
        try:
            path.name.encode()  # a name that is no UTF-8 can't be passed to other programs
            if path.is_dir() and any(segments_in(path)):
                runs.append((run.begun(), run.id, run))
        except Exception as error:  # noqa: BLE001 - one bad folder must not hide the other runs
            warn(f"memlog: {path} is left out, because it can't be read: {error}")
    return [run for _, _, run in sorted(runs, key=lambda known: known[:2])]


def find_run(root: Path, name: str) -> RunDirectory:
    """Return the run to which a name refers.

    ``name`` is the run's id, the beginning of the id, the name passed to ``init``, a name or id in a tracker,
    or ``latest`` for the newest run. An exact name takes precedence over the beginning of another run's id.

    Raises:
        RunNotFoundError: No run matches.
        AmbiguousRunError: More than one run matches.
    """
    runs = list_runs(root)
    if not runs:
        raise RunNotFoundError(
            f"there are no runs in {root}: train with memlog.init(), or name another folder with --dir or "
            "MEMLOG_DIR"
        )
    if not name:
        raise RunNotFoundError(
            f"no run is named: pass an id, the beginning of one, a name, or {LATEST!r}; `memlog runs` lists "
            "them"
        )
    if name == LATEST:
        return runs[-1]
    matches = [run for run in runs if run.id == name] or _called(runs, name)
    if len(matches) > 1:
        raise AmbiguousRunError(_which(matches, f"are called {name!r}", "pass one of these ids"))
    matches = matches or [run for run in runs if run.id.startswith(name)]
    if len(matches) > 1:
        raise AmbiguousRunError(_which(matches, f"begin with {name!r}", "name more of the id"))
    if not matches:
        raise RunNotFoundError(
            f"no run in {root} is called {name!r} or begins with it: `memlog runs` lists them"
        )
    return matches[0]


def _called(runs: Iterable[RunDirectory], name: str) -> list[RunDirectory]:
    """Return the runs whose name in ``init``, name in a tracker, or id in a tracker is ``name``."""
    # Imported here, because `run_names` imports this module.
    from memlog.journal.run_names import names_of  # noqa: PLC0415

    matches = []
    for run in runs:
        with suppress(Exception):  # one bad folder must not hide the other runs
            if name in names_of(run):
                matches.append(run)
    return matches


def _which(found: Sequence[RunDirectory], what: str, remedy: str) -> str:
    """Return a message: several runs match a name. The message lists the newest runs first."""
    newest = found[: -_CANDIDATES - 1 : -1]
    shown = ", ".join(f"{run.id} of {_local(run.begun())}" for run in newest)
    more = f" and {len(found) - len(newest):,} older" if len(found) > len(newest) else ""
    return f"{len(found):,} runs {what} ({shown}{more}): {remedy}"


def _local(seconds: float) -> str:
    # A damaged journal may have a number out of range.
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    return "an unknown time"


class Follower:
    """Reader that returns each event once, together with the id of the user's run that gets the event.

    ``target`` returns the id of the user's run that gets a segment's events; ``None``: skip the events.
    """

    def __init__(self, run: RunDirectory, target: Callable[[Header], str | None]) -> None:
        self._run = run
        self._target = target
        self._files: list[JournalFile] = []
        self._positions: dict[str, _FilePosition] = {}

    def look_again(self) -> None:
        """Look for the files of new processes at the next call of `news`."""
        self._files = []

    def news(self) -> Iterator[tuple[str, Header, Event]]:
        """Yield each event since the last call, with the id of the user's run and the segment's header."""
        everything = not self._files
        self._files = self._files or self._run.files()
        for file in self._files:
            position = self._positions.setdefault(file.process, _FilePosition())
            if everything or file.has_grown(position.at):
                yield from self._read(file, position)

    def _read(
        self, file: JournalFile, position: _FilePosition
    ) -> Iterator[tuple[str, Header, Event]]:
        for entry in file.read(position.at):
            if entry.header is not position.header:
                position.header = entry.header
                position.target = self._target(entry.header)
            position.at = entry.end
            if position.target is not None:
                yield position.target, entry.header, entry.event


class _FilePosition:
    def __init__(self) -> None:
        self.at: Position = START
        self.header: Header | None = None
        self.target: str | None = None
