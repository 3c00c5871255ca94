"""Backend for TensorBoard. The training process imports this module."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.sink import ClientBackend, Connection, TrackerRun
from memlog_tensorboard.last_step import last_step_in, step_of

logger = logging.getLogger("memlog")

OWN_FILE = "events.out.tfevents.0000000000.{begun:010d}.memlog-{run}"
"""Name of memlog's event file. TensorBoard reads a folder's files in the order of their names, and may never
read an earlier file again. memlog's files come before the user's files, so TensorBoard still reads the user's
new rows. Among themselves, memlog's files are in the order in which the sessions began."""
MOVED_FILE = ".memlog-{run}.moved"
"""End of the name of memlog's event file after `memlog_tensorboard.purges.file_to_follow`."""
LOGGING_DIR = "TENSORBOARD_LOGGING_DIR"
"""Environment variable that names the folder for memlog's own runs. Transformers reads it, too."""
_DEFAULT_FOLDER = "runs"
"""Folder in which torch's ``SummaryWriter()`` creates its folders by default."""

_WRITING_THREADS = (
    ("tensorboard.summary.writer.event_file_writer", "_AsyncWriterThread"),
    ("tensorboardX.event_file_writer", "_EventLoggerThread"),
)
"""Module and class of the thread that an open writer runs. memlog finds open writers by these threads."""

_MAX_NUMBER = 2**53
"""Largest number of a step. A negative number is read as one above it."""
_MAX_COUNTS = 64
_OLDEST_TIME, _DAY = 10**9, 86_400
"""Unix time in seconds before any program of today, and the seconds of a day."""


class TensorboardBackend(ClientBackend):
    """Backend that finds the folder to which the user's ``SummaryWriter`` writes."""

    name = requires = extra = "tensorboard"
    sink = "memlog_tensorboard.sink:TensorboardSink"

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._seen: TrackerRun | None = None
        self._numbers: dict[str, _Numbers] = {}
        """Numbers of the open writers, by folder."""

    def active_run(self) -> TrackerRun | None:
        """Return the folder of the writer that was opened last; ``None`` if none is open.

        A writer in a subfolder of another writer's folder does not count. ``add_scalars`` opens such writers.
        """
        known = (getattr(sys.modules.get(module), name, None) for module, name in _WRITING_THREADS)
        kinds = tuple(kind for kind in known if kind is not None)
        if not kinds:
            return None
        threads = [thread for thread in threading.enumerate() if isinstance(thread, kinds)]
        if threads != self._threads:
            # Paths are resolved only when a writer is new: the working directory may change later.
            self._threads = threads
            self._seen = _newest([folder for folder in map(_folder_of, threads) if folder])
            for thread in threads:
                self._look_at(thread)
        return self._seen

    def take_numbers(self, run: TrackerRun) -> Mapping[int, int]:
        """Return how often the user's writers have logged at each step since the last call.

        The writers are those of the run's folder and of folders in it, such as those of ``add_scalars``.
        """
        taken: dict[int, int] = {}
        for folder, numbers in self._numbers.items():
            if numbers.counts and (folder + os.sep).startswith(run.run_id + os.sep):
                for number, count in numbers.take().items():
                    taken[number] = taken.get(number, 0) + count
        return taken

    def see_no_numbers(self) -> None:
        """Stop looking at what the user's writers log."""
        for numbers in self._numbers.values():
            numbers.close()
        self._numbers.clear()
        self._threads = []

    def _look_at(self, thread: threading.Thread) -> None:
        """Look at the numbers of what a writer logs from now on."""
        name, queue = _file_of(thread), getattr(thread, "_queue", None)
        if name is not None and "://" not in name and hasattr(queue, "put"):
            folder = str(Path(name).parent)
            self._numbers.setdefault(folder, _Numbers()).look_at(queue)

    def last_step(self, run: TrackerRun) -> int | None:
        """Return the last step in the event files that earlier sessions of memlog wrote to the folder.

        If there is none, an earlier job did not use memlog: then return the last step in the user's files,
        except those that are being written.
        """
        files = [file for file in Path(run.run_id).glob("*tfevents*") if file.is_file()]
        own = [file for file in files if "memlog-" in file.name]
        being_written = [_file_of(thread) for thread in self._threads]
        earlier = own or [file for file in files if os.path.abspath(file) not in being_written]  # noqa: PTH100 - see `_file_of`
        steps = [last_step_in(file, of_memlog=bool(own)) for file in earlier]
        return max((step for step in steps if step is not None), default=None)

    def run_of(self, run_id: str, uri: str | None, name: str | None) -> TrackerRun | None:  # noqa: ARG002 - the folder is enough
        """Return the run of a logger's folder; ``None`` if the folder is not on this machine."""
        return None if "://" in run_id else run_in(Path(run_id).absolute())

    def connection(self) -> Connection:
        """Return the folder for runs of memlog's own."""
        return Connection(uri=str(Path(os.environ.get(LOGGING_DIR) or _DEFAULT_FOLDER).absolute()))


class _Numbers:
    """Numbers of what the writers of one folder log.

    A writer puts each record into the queue of its thread. memlog replaces the queue's method for this, as
    neither tensorboard nor tensorboardX has a callback.

    Attributes:
        counts: How often the writers logged at each number since the last `take`.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._queues: list[Any] = []

    def look_at(self, queue: Any) -> None:
        if "put" not in vars(queue):
            queue.put = self._observed(queue.put)
            self._queues.append(queue)

    def take(self) -> dict[int, int]:
        # The user's other threads may still count in the old dictionary.
        taken, self.counts = self.counts, {}
        return taken.copy()

    def close(self) -> None:
        while self._queues:
            vars(self._queues.pop()).pop("put", None)

    def _observed(self, put: Callable[..., object]) -> Callable[..., object]:
        def observed(record: Any, *args: Any, **kwargs: Any) -> object:
            # tensorboardX's records are events, and tensorboard's are their bytes.
            number = step_of(record) if isinstance(record, bytes) else getattr(record, "step", None)
            if number is not None:
                self._count(number)
            return put(record, *args, **kwargs)

        return observed

    def _count(self, number: int) -> None:
        if not 0 <= number <= _MAX_NUMBER or (number > _OLDEST_TIME and _is_time(number)):
            return
        counts = self.counts
        if number not in counts and len(counts) >= _MAX_COUNTS:
            counts.pop(next(iter(counts)), None)
        counts[number] = counts.get(number, 0) + 1


def _is_time(number: int) -> bool:
    """Return True for the present Unix time in seconds, or in thousandths or millionths of one."""
    return any(abs(number / unit - time.time()) < _DAY for unit in (1, 1_000, 1_000_000))


def run_in(folder: Path) -> TrackerRun:
    """Return the run of a log folder. TensorBoard identifies a run by its folder only."""
    return TrackerRun(
        str(folder), name=folder.name, link=f"tensorboard --logdir {shlex.quote(str(folder))}"
    )


def _file_of(thread: threading.Thread) -> str | None:
    """Return the file to which a writer's thread writes; ``None`` if it is unknown."""
    records = getattr(thread, "_record_writer", None)
    file = getattr(records, "_writer", None)
    # tensorboardX has the file's name in `_file_name`. tensorboard has the name in `filename`, or, if
    # TensorFlow is installed, in `name`.
    names = (getattr(records, "_file_name", None), getattr(file, "filename", None))
    found = next((name for name in (*names, getattr(file, "name", None)) if name), None)
    if found is None:
        return None
    name = os.fsdecode(found)
    return name if "://" in name else os.path.abspath(name)  # noqa: PTH100 - `Path.absolute` keeps dots


def _folder_of(thread: threading.Thread) -> Path | None:
    """Return the folder to which a writer's thread writes; ``None`` if the folder is not on this machine."""
    name = _file_of(thread)
    if name is None:
        return None
    if "://" in name:
        logger.warning(
            "memlog: the TensorBoard writer's file %s is not on this machine: memlog writes its event "
            "file to a folder of its own; name a local log_dir to have both in one",
            name,
        )
        return None
    return Path(name).parent


def _newest(folders: Sequence[Path]) -> TrackerRun | None:
    outer = [one for one in folders if not any(one.is_relative_to(o) and one != o for o in folders)]
    return run_in(outer[-1]) if outer else None
