"""Read a run's journal while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memlog.events import Event
from memlog.journal import Header, JournalFile, Position, RunDirectory
from memlog.journal.format import START


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
