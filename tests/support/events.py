"""What a program that a test has run left in its folder."""

from pathlib import Path
from typing import TypeVar

import memlog
from memlog.events import Trace
from memlog.journal import RunDirectory

EventT = TypeVar("EventT")


def runs_in(folder: Path) -> list[RunDirectory]:
    """The runs that were recorded in a working directory, the oldest first."""
    found = [RunDirectory(path) for path in (folder / "memlog_runs").glob("*") if path.is_dir()]
    return sorted(found, key=RunDirectory.begun)


def events_in(run: RunDirectory, kind: type[EventT]) -> list[EventT]:
    """The trainer's events of one kind, in order."""
    return [
        e.event for file in run.files("trainer") for e in file.read() if isinstance(e.event, kind)
    ]


def recorded(session: memlog.Session, kind: type[EventT]) -> list[EventT]:
    """A session's events of one kind, in order."""
    assert session.directory is not None
    files = RunDirectory(session.directory).files()
    return [e.event for file in files for e in file.read() if isinstance(e.event, kind)]


def traces(session: memlog.Session) -> list[Trace]:
    return recorded(session, Trace)
