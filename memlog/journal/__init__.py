"""The journal: files of a run's events, which outlive every process.

A run is a folder, ``<directory>/<run id>/``. Each process that publishes appends to segments of its own,
``trainer-<pid>-0001.jsonl``, …. A segment begins with a header (a JSON object); each line after it is one
record, ``[number, event]``. One ``write(2)`` writes a record, so the file has every event published before a
``kill -9``. The reader skips an incomplete last line, and counts it. A new segment begins when the
current segment is full, and when later events belong to another run in a tracker. The header names the
tracker's run.
"""

from memlog.journal.format import Binding, Header, Position, ProcessIdentity, binding_of
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
    "RunDirectory",
    "binding_of",
    "find_run",
    "list_runs",
    "new_run",
]
