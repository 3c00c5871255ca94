"""Work of a run's helper process for the other ranks that train together with the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import replacing
from memlog.delivery.helper import protocol
from memlog.delivery.helper.exit_watch import ExitWatch
from memlog.delivery.helper.node import NodeRuns, hand_over
from memlog.delivery.helper.rank_journal import RankJournal
from memlog.events import Event
from memlog.journal import RunDirectory
from memlog.ranks.ends import Failure
from memlog.ranks.registration import Registration, Training

_SEARCH = 1.0
"""Seconds between searches for a lower rank on this machine. The lower rank's helper can serve this run."""


class RankWork:
    """Work for the other ranks. It does nothing for a run that trains alone. No method raises.

    ``help_with`` runs a helper for the run of another rank of this machine. ``note`` gets what is published
    about the training.
    """

    def __init__(
        self,
        run: RunDirectory,
        begin: protocol.Begin,
        help_with: Callable[[protocol.Begin], object],
        note: Callable[[Event], object],
        diagnostics: Diagnostics,
    ) -> None:
        self._run = run
        self._begin = begin
        self._help_with = help_with
        self._note = note
        self._diagnostics = diagnostics
        self._journal: RankJournal | None = None
        self._node: NodeRuns | None = None
        # Watched first: how a process ended is known only if it was watched while it lived.
        self._exit = None if begin.registration is None else ExitWatch(begin.trainer_pid)
        self._registration: Registration | None = None
        self._training: Training | None = None
        self._search_due = 0.0

    def begin(self) -> None:
        """Begin the work if the run's rank is known."""
        if self._begin.registration is not None:
            self.take_registration(self._begin.registration)
            self.look()

    def take_registration(self, registration: Registration) -> None:
        """Begin the work. ``registration`` tells the run's rank. Rank 0 reads the others' journals."""
        with self._diagnostics.contained("beginning to follow the ranks"):
            self._registration = registration
            self._exit = self._exit or ExitWatch(self._begin.trainer_pid)
            if not self._begin.shared:
                self._node = NodeRuns(self._run, registration, self._help_with, self._diagnostics)
            if registration.position.rank == 0:
                self.lead()
            elif not self._begin.shared and registration.position.local_rank is None:
                self._training = Training(self._run, registration)
                hand_over(self._run, self._as_rank(registration))

    def _as_rank(self, registration: Registration) -> protocol.Begin:
        """Return the run's first message, with the rank and without trackers."""
        settings = msgspec.structs.replace(self._begin.settings, backends=())
        return msgspec.structs.replace(self._begin, registration=registration, settings=settings)

    def lead(self) -> None:
        """Begin to read the other ranks' journals. Call `lead` only for the lowest rank's run."""
        with self._diagnostics.contained("beginning to follow the ranks"):
            if self._registration is not None and self._journal is None:
                self._training = None  # no rank is lower, so `look` need not search for a lower one
                self._journal = RankJournal(
                    self._run,
                    self._registration,
                    self._begin.begun_us,
                    self._begin.settings.initial_step,
                    self._diagnostics,
                    self._note,
                )
                self._journal.start()

    def look(self) -> None:
        """Start helpers for other ranks of this machine that have begun.

        After a call of `hand_over`, end this process if a lower rank of this machine has begun. The lower
        rank's helper process then serves this run.
        """
        if self._training is not None and self._lower_rank_is_here(self._training):
            os._exit(protocol.HANDED_OVER)
        if self._node is not None:
            self._node.look_if_due()

    def publish_exit(self, publish: Callable[[Event], object]) -> None:
        if self._exit is not None:
            publish(self._exit.result())

    def follow_to_the_end(self) -> None:
        """Read the other ranks' last events."""
        if self._journal is not None:
            with self._diagnostics.contained("publishing the ranks' last steps"):
                self._journal.follow_to_the_end()

    def finish(self, title: str | None = None) -> None:
        """Publish how the training ended. ``title`` is the title of the report on the end of this rank."""
        if self._journal is not None:
            with self._diagnostics.contained("publishing how the ranks ended"):
                self._journal.finish(title)

    @property
    def failure(self) -> Failure | None:
        """Bad end of the training; ``None``: it ended well, or this run does not follow the other ranks."""
        return None if self._journal is None else self._journal.news.failure

    def join(self, *, delivered: bool) -> None:
        """Tell the trainer that its run is done, and wait for the end of the machine's other runs."""
        if self._node is None or self._node.are_over:
            return
        with (
            self._diagnostics.contained("noting that a run is delivered"),
            replacing(self._run.path, protocol.DONE) as file,
        ):
            file.write(protocol.ALL_DELIVERED if delivered else b"0")
        self._node.join()

    def _lower_rank_is_here(self, training: Training) -> bool:
        now = time.monotonic()
        if now < self._search_due:
            return False
        self._search_due = now + _SEARCH
        own = training.own
        return any(
            rank < own.position.rank and training.host(rank) == own.host and run.is_alive()
            for rank, run in training.search().items()
        )
