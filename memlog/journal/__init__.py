"""The run's own file: what was published survives the death of everything else.

A run is a folder, ``<directory>/<run id>/``. Each process that publishes appends to segments of its own,
``trainer-<pid>-0001.jsonl``, …: a header (a JSON object) and then one record a line, ``[number, event]``.
A record is one ``write(2)``, so what was published before a ``kill -9`` is there; a torn last line is
passed over and counted. A new segment begins when one is full, and when the tracker's run that events
belong to changes: the header says which that is.
"""

from memlog.journal.format import Binding, Header, Position, ProcessIdentity, Record
from memlog.journal.reader import Entry, JournalFile
from memlog.journal.runs import RunDirectory, find_run, list_runs, new_run
from memlog.journal.writer import JournalWriter

__all__ = [
    "Binding",
    "Entry",
    "Header",
    "JournalFile",
    "JournalWriter",
    "Position",
    "ProcessIdentity",
    "Record",
    "RunDirectory",
    "find_run",
    "list_runs",
    "new_run",
]
