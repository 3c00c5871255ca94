"""Events that a program left in its folder."""

from pathlib import Path
from typing import TypeVar

import memlog
from memlog.events import Trace
from memlog.journal import RunDirectory, list_runs

EventT = TypeVar("EventT")


def runs_in(folder: Path) -> list[RunDirectory]:
    """The runs that were recorded in a working directory, the oldest first."""
    return list_runs(folder / "memlog_runs")


def events_in(run: RunDirectory, kind: type[EventT]) -> list[EventT]:
    return [event for event in run.events("trainer") if isinstance(event, kind)]


def recorded(session: memlog.Session, kind: type[EventT]) -> list[EventT]:
    assert session.directory is not None
    found = RunDirectory(session.directory).events()
    return [event for event in found if isinstance(event, kind)]


def traces(session: memlog.Session) -> list[Trace]:
    return recorded(session, Trace)
