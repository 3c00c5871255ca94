"""Following a run's journal while it is written, for runs that are written in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memlog.events import Event
from memlog.journal import Header, JournalFile, Position, RunDirectory
from memlog.journal.format import START


class Follower:
    """Tells each event once, with the run of the user's that it goes to.

    Args:
        run: The run's folder.
        target: The id of the user's run that a segment's events go to; ``None``: none of them.
    """

    def __init__(self, run: RunDirectory, target: Callable[[Header], str | None]) -> None:
        self._run = run
        self._target = target
        self._files: list[JournalFile] = []
        self._readings: dict[str, _Reading] = {}

    def look_again(self) -> None:
        """Another process may have begun to write: the folder is to be looked through."""
        self._files = []

    def news(self) -> Iterator[tuple[str, Header, Event]]:
        """The events that came since the last call, where they go, and the header of their segment."""
        everything = not self._files
        self._files = self._files or self._run.files()
        for file in self._files:
            reading = self._readings.setdefault(file.process, _Reading())
            if everything or _has_grown(file, reading.at):
                yield from self._read(file, reading)

    def _read(self, file: JournalFile, reading: _Reading) -> Iterator[tuple[str, Header, Event]]:
        for entry in file.read(reading.at):
            if entry.header is not reading.header:
                reading.header = entry.header
                reading.target = self._target(entry.header)
            reading.at = entry.end
            if reading.target is not None:
                yield reading.target, entry.header, entry.event


class _Reading:
    """Where one process's segments are being read."""

    def __init__(self) -> None:
        self.at: Position = START
        self.header: Header | None = None
        self.target: str | None = None


def _has_grown(file: JournalFile, at: Position) -> bool:
    """Whether there may be something behind ``at``: two system calls, where reading takes thirty."""
    try:
        size = file.path(at.segment).stat().st_size
    except OSError:
        return True
    return size != at.offset or file.path(at.segment + 1).exists()
