"""Control, in the training process, of the helper process and the upload threads that deliver a run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.client import Outcome, SupervisedHelper
from memlog.delivery.helper.protocol import (
    Begin,
    Finish,
    JudgeNow,
    Lead,
    RequestReader,
    Settle,
    Settling,
)
from memlog.events import End, Health
from memlog.journal import JournalWriter, RunDirectory
from memlog.session.exit import Waiting, print_undelivered
from memlog.session.rank import SessionRank
from memlog.settings import Settings
from memlog.sink import LOCAL, Sink

if TYPE_CHECKING:
    from memlog.delivery.helper.protocol import AlertListener
    from memlog.delivery.uploader.retrying_worker import UploadWorker
    from memlog.in_process.writer import InProcessWriter


class RunDelivery:
    """The parts that deliver one run to its trackers.

    ``in_process`` holds the in-process writers, by backend name. ``sinks`` holds the sinks that the user
    passed as objects. Each of these sinks has an upload thread.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: Settings,
        journal: JournalWriter,
        diagnostics: Diagnostics,
        in_process: Mapping[str, InProcessWriter],
        sinks: Sequence[Sink],
    ) -> None:
        self._sinks = sinks
        self._run = run
        self._settings = settings
        self._journal = journal
        self._diagnostics = diagnostics
        self.helper = SupervisedHelper(diagnostics)
        self._writers = in_process
        self.threads: list[UploadWorker] = []
        self._settlings = 0

    def start_helper(
        self,
        begun_us: int,
        listener: AlertListener | None,
        requests: RequestReader | None,
        rank: SessionRank,
    ) -> None:
        """Start the helper process.

        ``listener`` receives alerts about what the helper samples; ``None``: no rule is about that.
        """
        self.helper.requests = requests
        rank.begin(self._run, begun_us, self.helper.send)
        begin = Begin(
            str(self._run.path),
            begun_us,
            os.getpid(),
            self._settings,
            requests_fd=None if requests is None else requests.descriptor,
            registration=rank.registration,
        )
        self.helper.start(begin, listener)

    def ask_to_judge(self) -> bool:
        """Ask the helper process to judge the steps so far. Return False if none can judge them."""
        helper = self.helper.current
        if self.helper.is_away or (helper.process is not None and helper.has_ended):
            return False
        self.helper.current.send(JudgeNow())
        return helper.process is not None

    def start_threads(self) -> None:
        if self._sinks:
            # Imported here because few users pass sinks as objects.
            from memlog.delivery.uploader.retrying_worker import deliver_to  # noqa: PLC0415

            names = self._settings.backends
            self.threads = deliver_to(self._sinks, self._run, names, self._diagnostics)

    def lead_if_lowest(
        self, rank: SessionRank, *, has_stepped: bool, is_final: bool = False
    ) -> bool:
        """Begin to deliver this rank's run if this rank is not 0 and no lower rank has a run.

        ``is_final`` is True if the run ends now. Return True if this call begins the delivery. After that,
        every call returns False.
        """
        if not rank.takes_lead(has_stepped=has_stepped, is_final=is_final):
            return False
        self._settings = rank.wanted
        self.helper.send(Lead(rank.wanted.backends, rank.wanted.name))
        self.start_threads()
        return True

    def finish(self, end: End, health: Health, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for delivery, and print a message if trackers still lack data."""
        begun = time.monotonic()
        outcome: Outcome = "dead"
        try:
            with self._diagnostics.contained("waiting for delivery"):
                outcome = self.send_end(end, health, timeout)
        except BaseException:  # Ctrl-C, or an exception of another signal's handler
            self.print_undelivered("at work", max(time.monotonic() - begun, 0.1))
            raise
        self.print_undelivered(outcome, timeout)

    def settle(self, backend: str, run_id: str, end: End, until: float) -> Settling:
        """Let the helper process settle a user's run that begins to end. The caller waits for the result.

        ``run_id`` is the tracker's id of the run. ``until``: see `Settling`.
        """
        self._settlings += 1
        settling = Settling(self._run, self._settlings, end, until, partial(_is_gone, self.helper))
        in_process = backend in self._writers
        self.helper.send(Settle(self._settlings, backend, run_id, end, in_process))
        return settling

    @property
    def _has_trackers(self) -> bool:
        named = bool(set(self._settings.backends) - {LOCAL} or self._journal.bindings)
        return named or self._settings.alert_webhook

    def send_end(self, end: End, health: Health, timeout: float) -> Outcome:
        """Send the helper process the end of the run, and wait at most ``timeout`` seconds for delivery."""
        deadline = time.monotonic() + timeout
        dropped, faults = dict(self._diagnostics.dropped), dict(self._diagnostics.faults)
        message = Finish(end, msgspec.structs.replace(health, dropped=dropped, faults=faults))
        threads: list[UploadWorker | InProcessWriter] = [*self.threads, *self._writers.values()]
        try:
            waiting = Waiting(self._run, timeout, self._diagnostics, quiet=not self._has_trackers)
            outcome = self.helper.last_helper().finish(message, timeout, waiting)
        finally:
            # Also after an interruption: otherwise the threads would not learn that the journal is
            # complete.
            for thread in threads:
                thread.complete()
        for thread in threads:
            if not thread.join(max(deadline - time.monotonic(), min(timeout, 1.0))):
                outcome = "at work" if outcome == "delivered" else outcome
        return outcome

    def print_undelivered(self, outcome: Outcome, waited: float) -> None:
        """Print a message if the run's trackers still lack data after ``waited`` seconds."""
        with self._diagnostics.contained("printing what is left to deliver"):
            if not self._has_trackers and (outcome == "dead" or not self.threads):
                outcome = "delivered"  # no tracker lacks data
            print_undelivered(self._run, outcome, waited, self._settings.linger, self._diagnostics)


def _is_gone(helper: SupervisedHelper) -> bool:
    """Return True if no helper process of this run will handle a message now."""
    return helper.is_away or helper.current.process is None or helper.current.has_ended
