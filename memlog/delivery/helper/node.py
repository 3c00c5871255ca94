"""One helper process for all ranks of a machine. It serves the run of each rank on a separate thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import read_plain, replacing
from memlog.delivery.helper import protocol
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.journal.format import UNDECODABLE
from memlog.ranks.registration import Registration, Training

HELD_WITHIN = 30.0
"""Seconds that a rank waits for the helper process of the machine's first rank. If that process has not taken
the rank's run by then, the rank starts a helper process itself."""
_FILE = "begin.json"
_MAX_BYTES = 1024**2
_SEARCH = 1.0
"""Seconds between searches for ranks of the machine."""


def hand_over(run: RunDirectory, begin: protocol.Begin) -> None:
    """Hand a run over to the helper process of another rank of the same machine.

    Write the run's first message to a file in the run's folder. The other rank's helper process finds the
    file and takes the run.

    Raises:
        OSError: The file can't be written.
    """
    with replacing(run.path, _FILE) as file:
        file.write(protocol.encode(begin))


def is_held(run: RunDirectory) -> bool:
    """Return whether a helper process has begun to help with the run."""
    return bool(run.files("helper"))


def handed_over(run: RunDirectory) -> protocol.Begin | None:
    """Return the first message that `hand_over` wrote for a run; ``None`` if it is missing or damaged."""
    try:
        begin = protocol.decode(read_plain(run.path, _FILE, _MAX_BYTES))
    except (OSError, ValueError, *UNDECODABLE):
        return None
    if not isinstance(begin, protocol.Begin):
        return None
    return msgspec.structs.replace(
        begin, run_directory=str(run.path), shared=True, alerts_fd=None, again=is_held(run)
    )


def _has_no_helper(run: RunDirectory) -> bool:
    # `with` releases the lock, because the helper on the new thread takes the lock itself.
    with HelperLock(run) as is_free:
        return is_free


class NodeRuns:
    """Runs of the other ranks of this machine, each with a helper on a thread of its own.

    ``run`` is the run for which this process was started. ``help_with`` runs the helper of another run, and
    returns when that run is over and delivered. It is called only if no other process helps with that run.
    """

    def __init__(
        self,
        run: RunDirectory,
        registration: Registration,
        help_with: Callable[[protocol.Begin], object],
        diagnostics: Diagnostics,
    ) -> None:
        self._training = Training(run, registration)
        self._own = run.id
        self._help_with = help_with
        self._diagnostics = diagnostics
        self._threads: dict[str, threading.Thread] = {}
        self._due = 0.0

    def look_if_due(self) -> None:
        """If a search is due, start helpers for runs that have begun since the last search. Never raises."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _SEARCH
            with self._diagnostics.contained("looking for the machine's other ranks"):
                self._look()

    def join(self) -> None:
        """Wait until the helpers of the other ranks' runs have ended."""
        for thread in list(self._threads.values()):
            thread.join()

    @property
    def are_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads.values())

    def _look(self) -> None:
        host = os.uname().nodename
        for rank, run in self._training.search().items():
            if run.id in self._threads or run.id == self._own or self._training.host(rank) != host:
                continue
            begin = handed_over(run)
            # If the run's own helper process has not ended yet, a later search starts the thread.
            if begin is not None and run.end() is None and _has_no_helper(run):
                thread = threading.Thread(
                    target=self._help, args=(begin,), name=f"memlog-rank-{rank}", daemon=True
                )
                self._threads[run.id] = thread
                thread.start()

    def _help(self, begin: protocol.Begin) -> None:
        with self._diagnostics.contained("helping with another rank's run"):
            self._help_with(begin)
