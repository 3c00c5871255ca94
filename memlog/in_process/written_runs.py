"""The user's runs in one backend, to which the in-process writer writes: saved states, and messages."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.delivery.helper.origin import command_and_host
from memlog.delivery.run_pages import keep_report
from memlog.events import (
    REPORT_FILE,
    Alert,
    Artifact,
    End,
    Event,
    Health,
    Origin,
    Parameters,
    PinnedMemory,
    Sample,
    now_us,
)
from memlog.in_process.row_buffer import SERIES_KIND, UsersRows, write_series
from memlog.journal import Header, RunDirectory
from memlog.journal.artifacts import artifact_path
from memlog.journal.delivery_state import InProcessState, UploadState
from memlog.metrics import in_run, parameters_of
from memlog.sink import InProcessRun

_NAMED = 5
"""Maximum number of runs that a message names."""


def shared_rows(folded: int, run_id: str, name: str) -> str:
    """Return a message: some steps share rows with later steps, and the file ``name`` has every step."""
    steps = "1 step shares" if folded == 1 else f"{folded:,} steps share"
    return (
        f"{steps} a row of run {run_id} with a later one, because the run has fewer rows than steps: the "
        f"row has the highest peaks, and the artifact {name} ({SERIES_KIND}) has every step"
    )


def copied_rows(run_id: str, name: str) -> str:
    """Return a message: the tracker's client copies rows from another tracker's files, without memlog."""
    return (
        f"run {run_id} gets its rows from another tracker's files (W&B: sync_tensorboard=True), and memlog "
        "can't add values to those rows: only rows that you log yourself, or one row of memlog's, have "
        f"memory. The artifact {name} ({SERIES_KIND}) has every step"
    )


def kept_nowhere(run_ids: Sequence[str]) -> str:
    """Return a message: the user disabled these runs, so the tracker has no data of the runs."""
    are = "is" if len(run_ids) == 1 else "are"
    return f"{_named(run_ids)} {are} disabled, so only memlog's folder of the run has its steps"


def _named(run_ids: Sequence[str]) -> str:
    named = ", ".join(run_ids[:_NAMED])
    if len(run_ids) > _NAMED:
        named += f" and {len(run_ids) - _NAMED:,} more"
    return f"run {named}" if len(run_ids) == 1 else f"runs {named}"


def ended_early(run_ids: Sequence[str], sync: str) -> str:
    """Return a message: the runs lack data, and the command ``sync`` delivers all steps to new runs."""
    new = "a new run" if len(run_ids) == 1 else "a new run for each"
    return (
        f"{_named(run_ids)} ended before memlog had written everything: `{sync}` delivers "
        f"the whole series to {new}"
    )


class RunState:
    """State of one of the user's runs. If the user ends and reopens the run, this object is kept.

    Attributes:
        user_run: The user's run, as the user opened it last.
        ended: True if the tracker's client has ended the run at the user's request.
        offset: `memlog.journal.Binding.offset` of the run.
    """

    def __init__(self, user_run: InProcessRun, diagnostics: Diagnostics) -> None:
        self.user_run = user_run
        self.ended = False
        self.offset = 0
        self.rows = UsersRows(diagnostics)
        self._diagnostics = diagnostics
        self.has_origin = self.has_report = False
        """True if the run gets the trainer's command and host, or the report, from the helper process."""
        self._closed_us: int | None = None
        self._others: list[Parameters | Alert | Artifact] = []
        self._in_series = 0
        self._begin()

    @property
    def is_waiting(self) -> bool:
        """True if data waits for the run. While the run can get more rows, values for rows do not count."""
        rows_come = self.is_watched and self.user_run.is_open
        return bool(self._others) or (self.rows.has_waiting and not rows_come)

    @property
    def needs_series(self) -> bool:
        """True if a step shares a row with a later step, and the tracker has no CSV file with this step."""
        return self.rows.folded > self._in_series

    @property
    def is_whole(self) -> bool:
        """True if the tracker has everything of the run so far."""
        return not self.is_waiting and not self.needs_series

    def resume(self, user_run: InProcessRun) -> None:
        """Continue to write to the run, because the user has opened it again."""
        self.user_run, self.ended, self._closed_us = user_run, False, None
        self.has_report = False
        self._begin()

    def close(self) -> None:
        """Record that the run ends now. It needs no later health events, samples and alerts."""
        self._closed_us = now_us()

    def _begin(self) -> None:
        self.is_watched = False
        with self._diagnostics.contained("beginning to watch the user's rows"):
            self.rows.open(self.user_run.watch_rows(self.rows))
            self.is_watched = True

    def receive(self, event: Event) -> None:
        """Add the values of a new event of this process to the data that waits for the run's rows.

        Call this method only on the user's newest run.
        """
        own = in_run(event, self.offset)
        if own is not None and self._is_wanted(own):
            self.rows.receive(own)

    def take(self, event: Event, *, received: bool) -> None:
        """Add an event from the journal to the data that waits for the run.

        If ``received`` is True, `receive` has already got the event, so leave the event's values out.
        """
        own = in_run(event, self.offset)
        if own is None or not self._is_wanted(own):
            return
        if not received:
            self.rows.fold_received()  # the helper's events may be of later steps
            self.rows.add(own)
        if not self.user_run.is_open and self._comes_too_late(own):
            return
        self.has_origin = self.has_origin or isinstance(own, Origin)
        self.has_report = self.has_report or (isinstance(own, Artifact) and own.is_report)
        other = own if isinstance(own, (Alert, Artifact)) else parameters_of(own)
        if other is not None:
            self._others.append(other)

    def _comes_too_late(self, event: Event) -> bool:
        """Return whether an ended run is complete without an event: it has its own, or the event is newer."""
        if isinstance(event, Artifact):
            return event.is_report
        is_newer = self._closed_us is not None and event.time_us >= self._closed_us
        return isinstance(event, Origin) or (isinstance(event, Alert) and is_newer)

    def _is_wanted(self, event: Event) -> bool:
        """Return whether the run needs an event. Ended runs need no health events and no samples."""
        goes_on = self.user_run.is_open and self._closed_us is None
        return goes_on or not isinstance(event, (Health, PinnedMemory, Sample))

    def write_others(self, run: RunDirectory) -> None:
        """Write the data that is in no row: parameters, alerts, files."""
        self.rows.fold_received()
        if not self._others or not self.user_run.is_open:
            return
        # Files last: if the server can't be reached, only the files wait for it, and then fail.
        for other in sorted(self._others, key=lambda event: isinstance(event, Artifact)):
            self._write(other, run)
            self._others.remove(other)

    def put_remaining(self, *, final: bool = True) -> None:
        """Put the values that wait into the user's run. Call it on the user's thread.

        Pass ``final`` as False if the user may still log to the last row. memlog then adds no row, because a
        new row would close the last row. Values of steps after the last row wait for the user's next row.
        """
        if not self.is_watched or not self.user_run.is_open:
            return
        with self._diagnostics.contained("putting the last values into the user's run"):
            if points := self.rows.take_for_open_row():
                self.user_run.log(points, new_row=False)
            if final and (points := self.rows.take_for_new_row()):
                self.user_run.log(points, new_row=True)
            if not self.rows.has_waiting:
                self.user_run.leave_rows()

    def log_series(self, artifact: Artifact, run: RunDirectory) -> None:
        """Write ``artifact``, a CSV file with every point so far, to the user's run."""
        self.user_run.log_artifact(artifact, run.path / artifact.path, run.id)
        self._in_series = self.rows.folded

    def _write(self, event: Parameters | Alert | Artifact, run: RunDirectory) -> None:
        if isinstance(event, Parameters):
            self.user_run.log_parameters(event.values)
        elif isinstance(event, Alert):
            self.user_run.log_alert(event)
        elif (file := artifact_path(run, event)) is not None:
            self.user_run.log_artifact(event, file, run.id)


_HANGS_AFTER = 0.5
"""Seconds after which a call of the tracker's client can count as hanging."""
_WORKS = 0.02
"""Minimum processor seconds per second of a call that works. A call that waits for a server takes less."""
_MOST_JOURNAL = 8 * 1024**2
"""If a journal has more bytes than this, the user's process makes no report from it.

At this size, making the report takes about a second.
"""


class WrittenRuns:
    """The user's runs of one backend, by id.

    Attributes:
        state: State of the in-process writer. `save` writes it to a file.
    """

    def __init__(self, run: RunDirectory, backend: str, diagnostics: Diagnostics) -> None:
        self._run = run
        self._diagnostics = diagnostics
        self._by_id: dict[str, RunState] = {}
        self._disabled: set[str] = set()
        self.state = InProcessState(backend=backend)
        self._in_client: tuple[float, float, int] | None = None
        """Time and processor seconds of a thread as it called the client, and the thread."""

    def __iter__(self) -> Iterator[RunState]:
        """Yield the state of each run. Meanwhile, the publishing thread may add a run."""
        return iter(list(self._by_id.values()))

    @contextmanager
    def calls_client(self) -> Iterator[None]:
        """Context manager for each call of the tracker's client, which may hang."""
        thread = threading.get_ident()
        self._in_client = time.monotonic(), _processor_seconds(thread), thread
        try:
            yield
        finally:
            self._in_client = None

    @property
    def client_hangs(self) -> bool:
        """True if a call of the tracker's client only waits. A call that works is slow on a busy machine."""
        if self._in_client is None:
            return False
        since, spent, thread = self._in_client
        waited = time.monotonic() - since
        works = _processor_seconds(thread) - spent >= _WORKS * waited
        return waited >= _HANGS_AFTER and not works

    def get(self, run_id: str) -> RunState | None:
        """Return the state of the run with this id; ``None`` if this writer does not write to that run."""
        return self._by_id.get(run_id)

    def current(self, user_run: InProcessRun) -> RunState | None:
        """Return the state of a user's run.

        Return ``None`` if this writer does not write to the run. Return ``None`` also if ``user_run`` is out
        of date, because the user has reopened the run.
        """
        run_state = self._by_id.get(user_run.run_id)
        return run_state if run_state is not None and run_state.user_run is user_run else None

    def add(self, user_run: InProcessRun) -> RunState:
        """Begin to write to a run that the user has opened or reopened."""
        self._note(user_run.run_id)
        run_state = self._by_id.get(user_run.run_id)
        if run_state is None:
            run_state = self._by_id[user_run.run_id] = RunState(user_run, self._diagnostics)
        else:
            run_state.resume(user_run)
        return run_state

    def add_disabled(self, run_id: str) -> None:
        """Record that the user has disabled a run, so the tracker keeps nothing of the run."""
        self._note(run_id)
        self._disabled.add(run_id)

    def _note(self, run_id: str) -> None:
        if run_id not in self.state.joined:
            self.state.joined = [*self.state.joined, run_id]

    def target(self, header: Header) -> str | None:
        """Return the id of the user's run that gets a segment's events; ``None`` if there is no such run.

        The user's first run also gets the events that were published before the user opened it. But if the
        helper process has already opened memlog's own run, memlog's own run gets these events.
        """
        binding = header.bindings.get(self.state.backend)
        if binding is not None:
            return binding.run_id
        own = UploadState.load(self._run, self.state.backend).own_run
        return next(iter(self.state.joined), None) if own is None else None

    def write_series(self, run_state: RunState) -> None:
        """If the run is open and has fewer rows than steps, add a CSV file with every step to the run.

        While other data waits for the run (`RunState.is_waiting`), nothing is written.
        """
        if run_state.is_waiting or not run_state.needs_series or not run_state.user_run.is_open:
            return
        run_id = run_state.user_run.run_id
        name = f"series-{run_id}.csv"
        try:
            artifact = write_series(
                self._run, name, lambda header: self.target(header) == run_id, run_state.offset
            )
            with self.calls_client():
                run_state.log_series(artifact, self._run)
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._diagnostics.fault(f"writing the whole series to {self.state.backend}", error)
        else:
            copied = getattr(run_state.user_run, "copies_rows", False)
            folded = run_state.rows.folded
            say(copied_rows(run_id, name) if copied else shared_rows(folded, run_id, name))

    def write_origin(self, run_state: RunState) -> None:
        """Write the trainer's command and host to an ending run, if the helper has not told them in time."""
        if run_state.has_origin or not run_state.user_run.is_open:
            return
        try:
            known = parameters_of(command_and_host(os.getpid()))
            if known is not None:
                with self.calls_client():
                    run_state.user_run.log_parameters(known.values)
                run_state.has_origin = True
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._diagnostics.fault(f"writing the command to {self.state.backend}", error)

    def write_report(self, run_state: RunState, end: End | None) -> None:
        """Write memlog's report to a run that the user ends, unless the journal exceeds `_MOST_JOURNAL`.

        ``end`` is how the run ends; ``None``: unknown.
        """
        size = sum(file.size for file in self._run.files())
        if size > _MOST_JOURNAL or not run_state.user_run.is_open:
            return
        name = f"report-{run_state.user_run.run_id}-trainer.html"
        try:
            artifact = keep_report(self._run, name, end=end)
            if artifact is not None:
                # In the run's folder, the report has a name of its own, so that the helper's
                # reports do not replace it.
                shown = replace(artifact, name=REPORT_FILE)
                with self.calls_client():
                    run_state.user_run.log_artifact(
                        shown, self._run.path / shown.path, self._run.id
                    )
        except Exception as error:  # noqa: BLE001 - whatever the tracker's client raises
            self._diagnostics.fault(f"writing the report to {self.state.backend}", error)

    def end(self) -> None:
        """Write the missing CSV files, and print which runs lack data. Call it after the journal's end."""
        for run_state in self:
            self.write_series(run_state)
        self.state.stage = "done"
        missing = [run_id for run_id in self.state.joined if not self._is_whole(run_id)]
        if missing:
            self.state.stage = "waiting"
            self.state.problem = ended_early(missing, self._run.command("sync"))
            say(self.state.problem)
        elif self._disabled:
            self.state.problem = kept_nowhere(sorted(self._disabled))
            say(self.state.problem)
        self.save(over=True)

    def _is_whole(self, run_id: str) -> bool:
        run_state = self._by_id.get(run_id)
        return run_id in self._disabled or (run_state is not None and run_state.is_whole)

    def save(self, *, over: bool) -> None:
        """Save the state. ``over`` is True if the session is over.

        Until the session is over, ``state.whole`` does not include an open run, because the run can get more
        data.
        """
        every = list(self)
        self.state.delivered = sum(run_state.rows.delivered for run_state in every)
        self.state.folded = sum(run_state.rows.folded for run_state in every)
        self.state.whole = [
            run_state.user_run.run_id
            for run_state in every
            if run_state.is_whole and (over or run_state.ended)
        ] + sorted(self._disabled)
        self.state.save(self._run)


def _processor_seconds(thread: int) -> float:
    """Return the processor seconds that a thread has taken; 0 if the system does not tell."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except OSError:
        return 0.0
