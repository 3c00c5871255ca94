"""The journal: files of a run's events, which outlive every process.

A run is a folder, ``<directory>/<run id>/``. Each process that publishes events has its own files, called
segments: ``trainer-<pid>-0001.jsonl``, …. The first line of a segment is a header (a JSON object). Each later
line is one record, ``[number, event]``. A record is stored into the file's mapped memory, or written with one
``write(2)``, so it survives a ``kill -9``. In the file of a running or killed process, zero bytes may follow
the last line. The reader skips and counts an incomplete last line. The header names the run in a tracker to
which the events belong. A new segment begins when a segment is full, or when the run in the tracker changes.
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
