"""Work of a run's helper process for all ranks of the training, and their memory in rank 0's run.

Rank 0's helper process reads the other ranks' journals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper import protocol
from memlog.delivery.helper.rank_news import ROLE, RankReader, TrainingNews
from memlog.delivery.helper.training_process import ExitWatch
from memlog.events import (
    Alert,
    Artifact,
    Batch,
    End,
    Event,
    Exit,
    Finding,
    RankDoubt,
    RankFailure,
    Ranks,
)
from memlog.journal import Binding, Header, JournalWriter, RunDirectory
from memlog.journal.artifacts import postmortem_title
from memlog.journal.delivery_state import HelperLock
from memlog.ranks.ends import Failure
from memlog.ranks.registration import Registration, Training, last_step, registration_of
from memlog.ranks.spreads import RankSpreads


class RankWork:
    """Work for the other ranks. It does nothing for a run that trains alone. No method raises.

    ``note`` gets what is published about the training.
    """

    def __init__(
        self,
        run: RunDirectory,
        begin: protocol.Begin,
        note: Callable[[Event], object],
        diagnostics: Diagnostics,
    ) -> None:
        self._run = run
        self._begin = begin
        self._note = note
        self._diagnostics = diagnostics
        self._journal: RankJournal | None = None
        # Watched first: how a process ended is known only if it was watched while it lived.
        self._exit = None if begin.registration is None else ExitWatch(begin.trainer_pid)
        self._registration: Registration | None = None

    def begin(self) -> None:
        """Begin the work if the run's rank is known."""
        if self._begin.registration is not None:
            self.take_registration(self._begin.registration)

    def take_registration(self, registration: Registration) -> None:
        """Begin the work. ``registration`` tells the run's rank. Rank 0 reads the others' journals."""
        with self._diagnostics.contained("beginning to follow the ranks"):
            self._registration = registration
            self._exit = self._exit or ExitWatch(self._begin.trainer_pid)
            if registration.position.rank == 0:
                self.lead()

    def lead(self) -> None:
        """Begin to read the other ranks' journals. Call `lead` only for the lowest rank's run."""
        with self._diagnostics.contained("beginning to follow the ranks"):
            if self._registration is not None and self._journal is None:
                self._journal = RankJournal(
                    self._run,
                    self._registration,
                    self._begin.begun_us,
                    self._begin.settings.initial_step,
                    self._diagnostics,
                    self._note,
                )
                self._journal.start()

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


_PAUSE = 0.5
"""Minimum seconds between two readings of the journals."""
_SHARE = 0.05
"""Maximum fraction of one processor's time for reading. The pauses become longer if there are many ranks."""
_SEARCH = 2.0
"""Seconds between searches for ranks, and for new files of known ranks."""
_MOST_JUDGED = 64
"""Maximum number of ranks in whose memory a rise without a known cause is noticed."""
_ENDING = 5.0
"""Maximum seconds that the end of rank 0's run waits for the other ranks' last steps."""


class RankJournal:
    """Reader of all ranks' journals while they are written. It writes a journal of its own in rank 0's run.

    A helper process that replaces an earlier one writes only steps and alerts that the journal lacks.

    ``note`` gets what the journal tells about the training, except the steps.
    """

    def __init__(
        self,
        run: RunDirectory,
        registration: Registration,
        begun_us: int,
        initial_step: int,
        diagnostics: Diagnostics,
        note: Callable[[Event], object] = lambda _: None,
    ) -> None:
        self._run = run
        self._note = note
        self._begun_us, self._initial_step = begun_us, initial_step
        self._diagnostics = diagnostics
        self._training = Training(run, registration)
        published = list(run.events(ROLE))
        steps = [event.step for event in published if isinstance(event, Ranks)]
        self._spreads = RankSpreads(
            registration.position.world_size, initial_step, max(steps, default=None)
        )
        self._told = {
            _identity(event) for event in published if isinstance(event, (Alert, Finding))
        }
        self._has_told_failure = any(isinstance(event, RankFailure) for event in published)
        for event in published:
            if not isinstance(event, Ranks):
                note(event)
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

    def follow_to_the_end(self) -> None:
        """Wait for the other ranks' last steps and ends, and publish the steps."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(4 * _ENDING)

    def finish(self, title: str | None) -> None:
        """Publish how the training ended, if it ended badly. Call it after `follow_to_the_end`.

        ``title`` is the title of the report on the end of this rank; ``None``: there is no report.
        """
        self._tell_failure(title)
        self._tell_doubt()
        if self._journal is not None:
            self._journal.close()

    def explain(self) -> str | None:
        """Write the report on the end of this rank, unless another rank failed first. Return its title."""
        from memlog.delivery.helper.postmortem import explain_afterwards  # noqa: PLC0415 - see `_tell_failure`

        failure = self.news.failure
        if failure is None or self._another_failed(failure):
            return None
        explain_afterwards(self._run, "sync", self._diagnostics, failure)
        return postmortem_title(self._run)

    def publish_rest(self) -> None:
        """Publish the steps and alerts that the journal lacks. Call it when the training is over."""
        self.look(search=True, final=True)
        for rank, reader in self._readers.items():
            if not reader.has_ended:
                self.news.lost(rank)

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
        self._publish_news(final=final)
        if self.news.has_settled and self._another_failed(self.news.failure):
            self._tell_failure(None)

    def _another_failed(self, failure: Failure | None) -> bool:
        return (
            failure is not None
            and failure.first is not None
            and failure.first.rank != self._own_rank
        )

    def _tell_failure(self, title: str | None) -> None:
        """Publish which rank failed first, once. Nothing else waits for this rank if it hangs."""
        failure = self.news.failure
        if failure is None or self._has_told_failure:
            return
        self._has_told_failure = True
        with self._diagnostics.contained("telling which rank failed first"):
            # Imported here: few trainings fail, and the import would delay the helper's start.
            from memlog.delivery.helper.rank_news import (  # noqa: PLC0415
                about_another_rank,
                about_failure,
            )

            events: Iterator[RankFailure | Alert | Artifact]
            if failure.first is None or failure.first.rank == self._own_rank:
                events = about_failure(self._run, failure, title, self._diagnostics)
            else:
                reader = self._readers[failure.first.rank]
                events = about_another_rank(
                    self._run, failure, reader, self._look_for_more, self._diagnostics
                )
            for event in events:
                self._write(event, failure.step)

    def _tell_doubt(self) -> None:
        """If the run ended well, publish that another rank's memory rose for an unknown reason."""
        own = self._readers.get(self._own_rank)
        if self.news.failure is not None or own is None or not own.is_over:
            return
        from memlog.delivery.helper.rank_news import doubt_about  # noqa: PLC0415 - see `_tell_failure`

        doubt = doubt_about(self._own_rank, self._readers, self._diagnostics)
        if doubt is not None:
            self._write(doubt, doubt.step)

    def _look_for_more(self) -> None:
        """Read what the helper process of the rank that failed first has found."""
        self._look(search=True)
        self._publish_news(final=True)

    def _publish_news(self, *, final: bool) -> None:
        for told in self.news.news(final=final):
            # An earlier helper process may have published the event.
            if _identity(told) not in self._told:
                self._write(told, told.step)

    def _look(self, *, search: bool) -> None:
        now = time.monotonic()
        if search or now >= self._search_due:
            self._search_due = now + _SEARCH
            for rank, run in self._training.search().items():
                if rank not in self._readers:
                    is_judged = rank != self._own_rank and len(self._readers) < _MOST_JUDGED
                    self._readers[rank] = RankReader(run, is_judged=is_judged)
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

    def _write(
        self, event: Ranks | Alert | Finding | Artifact | RankFailure | RankDoubt, step: int | None
    ) -> None:
        """Write an event to the journal. Each tracker's run that has rank 0's step ``step`` gets the event.

        If ``step`` is ``None``, the event goes to the same runs as the previous event.
        """
        if step is not None:
            for backend, binding in self._own_runs.at(step).items():
                if self._writer.bindings.get(backend) != binding:
                    self._writer.bind(backend, binding)
        self._writer.append(event)
        if not isinstance(event, Ranks):
            self._note(event)

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

    Explain how the training ended, if it ended badly. Do nothing if a rank still lives, or if the run is not
    the lowest rank's. Errors are logged.
    """
    own, header, diagnostics = registration_of(run), run.trainer(), Diagnostics()
    if own is None or header is None:
        return
    with diagnostics.contained("combining the ranks' memory"):
        with HelperLock(run) as is_free:
            runs = Training(run, own).search()
            if not is_free or min(runs) != own.position.rank or _is_complete(run, runs):
                return
            journal = RankJournal(run, own, header.begun_us, header.initial_step, diagnostics)
            journal.publish_rest()
        # Without the lock, which it takes itself.
        title = journal.explain()
        journal.finish(title)


def _is_complete(run: RunDirectory, found: Mapping[int, RunDirectory]) -> bool:
    """Return True if the journal about all ranks is complete, or can't be completed yet."""
    if any(other.is_alive() for other in found.values()):
        return True
    events = list(run.events(ROLE))
    steps = max((event.step for event in events if isinstance(event, Ranks)), default=None)
    if any(isinstance(event, RankFailure) for event in events):
        return True
    ends = [other.end() for other in found.values()]
    are_good = all(end is not None and end.status == "finished" for end in ends)
    return are_good and steps == last_step(run)


def _identity(event: Alert | Finding) -> tuple[str, str, int | None]:
    if isinstance(event, Finding):
        return event.kind, event.title, event.step
    return event.rule, event.title, event.step
