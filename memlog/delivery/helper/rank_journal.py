"""Write the memory of all ranks to rank 0's run. Rank 0's helper process reads the other ranks' journals."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.rank_reader import ROLE, RankReader
from memlog.delivery.helper.training_news import TrainingNews
from memlog.events import Alert, Batch, End, Event, Exit, Ranks
from memlog.journal import Binding, Header, JournalWriter, RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.ranks.registration import Registration, Training, last_step, registration_of
from memlog.ranks.spreads import RankSpreads

_PAUSE = 0.5
"""Minimum seconds between two readings of the journals."""
_SHARE = 0.05
"""Maximum fraction of one processor's time for reading. The pauses become longer if there are many ranks."""
_SEARCH = 2.0
"""Seconds between searches for ranks, and for new files of known ranks."""
_ENDING = 5.0
"""Maximum seconds that the end of rank 0's run waits for the other ranks' last steps."""


class RankJournal:
    """Reader of all ranks' journals while they are written. It writes a journal of its own in rank 0's run.

    A helper process that replaces an earlier one writes only steps and alerts that the journal lacks.
    """

    def __init__(
        self,
        run: RunDirectory,
        registration: Registration,
        begun_us: int,
        initial_step: int,
        diagnostics: Diagnostics,
    ) -> None:
        self._run = run
        self._begun_us, self._initial_step = begun_us, initial_step
        self._diagnostics = diagnostics
        self._training = Training(run, registration)
        published = list(run.events(ROLE))
        steps = [event.step for event in published if isinstance(event, Ranks)]
        self._spreads = RankSpreads(
            registration.position.world_size, initial_step, max(steps, default=None)
        )
        self._told = {_identity(event) for event in published if isinstance(event, Alert)}
        self._readers: dict[int, RankReader] = {}
        self.news = TrainingNews(registration, self._readers)
        self._journal: JournalWriter | None = None
        self._own_rank = registration.position.rank
        self._own_runs = _OwnRuns()
        self._search_due = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="memlog-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Wait at most `_ENDING` seconds for the other ranks' last steps, and publish these steps."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(2 * _ENDING)
        if self._journal is not None:
            self._journal.close()

    def publish_rest(self) -> None:
        """Publish the steps and alerts that the journal lacks. Call it when the training is over."""
        self.look(search=True, final=True)
        if self._journal is not None:
            self._journal.close()

    def _follow(self) -> None:
        pause = _PAUSE
        while not self._ending.wait(pause):
            pause = self._look_contained()
        deadline = time.monotonic() + _ENDING
        while True:
            self._look_contained(search=True)
            are_over = all(reader.is_over for reader in self._readers.values())
            if are_over or time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE / 5)
        with self._diagnostics.contained("publishing the ranks' last steps"):
            self.look(final=True)

    def _look_contained(self, *, search: bool = False) -> float:
        """Read the new events, and return the seconds until the next reading."""
        before = time.thread_time()
        with self._diagnostics.contained("reading the ranks' journals"):
            self.look(search=search)
        return max(_PAUSE, (time.thread_time() - before) / _SHARE)

    def look(self, *, search: bool = False, final: bool = False) -> None:
        """Read the new events, and publish the complete steps and the alerts.

        With ``search``, search for ranks and their files even if that is not due. With ``final``,
        the training is over: also publish the steps that some ranks have not made.
        """
        self._look(search=search)
        for event in self._spreads.take(final=final):
            self._write(event, event.step)
        for alert in self.news.alerts(final=final):
            # An earlier helper process may have published the alert.
            if _identity(alert) not in self._told:
                self._write(alert, alert.step)

    def _look(self, *, search: bool) -> None:
        now = time.monotonic()
        if search or now >= self._search_due:
            self._search_due = now + _SEARCH
            for rank, run in self._training.search().items():
                if rank not in self._readers:
                    self._readers[rank] = RankReader(run)
                    self._spreads.know(rank)
            for rank, reader in self._readers.items():
                reader.look_again()
                if reader.is_lost:
                    self._spreads.end(rank)
                    self.news.lost(rank)
        for rank, reader in self._readers.items():
            for header, event in reader.news():
                self._take(rank, header, event)

    def _take(self, rank: int, header: Header, event: Event) -> None:
        if isinstance(event, Batch):
            self._spreads.add(rank, event)
            if rank == self._own_rank:
                self._own_runs.note(event.step, header.bindings)
        elif isinstance(event, (End, Exit)):
            self._spreads.end(rank)
        self.news.take(rank, event)

    def _write(self, event: Ranks | Alert, step: int | None) -> None:
        """Write an event to the journal. Each tracker's run that has rank 0's step ``step`` gets the event.

        If ``step`` is ``None``, the event goes to the same runs as the previous event.
        """
        if step is not None:
            for backend, binding in self._own_runs.at(step).items():
                if self._writer.bindings.get(backend) != binding:
                    self._writer.bind(backend, binding)
        self._writer.append(event)

    @property
    def _writer(self) -> JournalWriter:
        """Writer of the journal, created when the first event is written."""
        if self._journal is None:
            self._journal = JournalWriter(
                self._run.path,
                run=self._run.id,
                role=ROLE,
                begun_us=self._begun_us,
                initial_step=self._initial_step,
                diagnostics=self._diagnostics,
            )
        return self._journal


class _OwnRuns:
    """The trackers' runs to which rank 0's steps belong, and the first step of each run."""

    def __init__(self) -> None:
        self._since: list[tuple[int, Mapping[str, Binding]]] = []

    def note(self, step: int, bindings: Mapping[str, Binding]) -> None:
        if not self._since or bindings != self._since[-1][1]:
            self._since.append((step, bindings))

    def at(self, step: int) -> Mapping[str, Binding]:
        """Return, for each backend, the run to which ``step`` belongs.

        ``step`` must not be lower than at the call before.
        """
        while len(self._since) > 1 and self._since[1][0] <= step:
            del self._since[0]
        return self._since[0][1] if self._since and self._since[0][0] <= step else {}


def publish_afterwards(run: RunDirectory) -> None:
    """Publish the missing steps and alerts of all ranks, if the helper process died with the trainer.

    Do nothing if a rank still lives, or if the run is not the lowest rank's. Errors are logged.
    """
    own, header, diagnostics = registration_of(run), run.trainer(), Diagnostics()
    if own is None or header is None:
        return
    with diagnostics.contained("combining the ranks' memory"), HelperLock(run) as is_free:
        found = Training(run, own).search()
        if not is_free or min(found) != own.position.rank:
            return
        steps = (event.step for event in run.events(ROLE) if isinstance(event, Ranks))
        if max(steps, default=None) == last_step(run) or any(r.is_alive() for r in found.values()):
            return
        RankJournal(run, own, header.begun_us, header.initial_step, diagnostics).publish_rest()


def _identity(alert: Alert) -> tuple[str, str, int | None]:
    return alert.rule, alert.title, alert.step
