"""The helper process: runs the uploaders, samples the process tree, outlives the trainer.

After the run's end or the trainer's death, the process delivers the remaining data, and then ends. If a
tracker can't be reached, the process ends after ``linger`` seconds. ``memlog sync`` can deliver the data from
the journal later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import bare_address, without_credentials
from memlog.bus import EventBus
from memlog.delivery.helper import protocol
from memlog.delivery.helper.judging import HelperJudge
from memlog.delivery.helper.origin import OriginReader
from memlog.delivery.helper.rank_journal import RankWork
from memlog.delivery.helper.retention import Retention
from memlog.delivery.helper.run_uploaders import RunUploaders
from memlog.delivery.helper.sampler import Sampler
from memlog.delivery.helper.training_process import (
    LineReader,
    StopTime,
    TrainingProcess,
    first_message,
)
from memlog.delivery.run_pages import HelpersReport, WorstStepGraph, make_later
from memlog.errors import UnwritableDirectoryError
from memlog.events import End, Health, now_us
from memlog.journal import Binding, JournalWriter, RunDirectory, binding_of
from memlog.journal.delivery_state import HelperLock
from memlog.probes.machine import OomKills

logger = logging.getLogger("memlog.delivery")

TICK = 0.2
"""Maximum seconds between two passes of the helper's loop."""
UNDELIVERED = 3
"""Exit code of a helper that ended before everything was delivered."""
ANOTHER_PROGRAM = (
    "its process runs another program now (exec), and memlog.finish() was not called before"
)
"""Reason for the status ``killed`` of a run whose process lives on as another program."""
_SETTLE_WAIT = 0.3
"""Maximum seconds that the end of a user's run waits for git."""
_WORTH_A_REPORT_US = 10_000_000
"""If a run without a tracker lasted less than these microseconds, the helper makes no report of the run.

Making a report takes half a second.
"""


Judge: TypeAlias = Callable[[protocol.Begin, EventBus, Diagnostics], HelperJudge]
"""Function that makes the judge of a run."""


class Helper:
    """The helper of one run. ``stop`` is the time at which the helper must end, even if the run goes on."""

    def __init__(self, begin: protocol.Begin, judge: Judge, stop: StopTime) -> None:
        self._begin = begin
        self._settings = begin.settings
        self._diagnostics = Diagnostics()
        self._run = RunDirectory(Path(begin.run_directory))
        self._lock = HelperLock(self._run)
        with self._diagnostics.contained("taking the helper's lock"):
            self._lock.take()
        self._journal = _writer(self._run, begin, self._diagnostics)
        self._bus = EventBus(self._diagnostics)
        self._bus.subscribe(self._journal.append)
        self._told: set[tuple[str, str, int]] = set()
        """Backend, id and offset of each of the user's runs of which the trainer has told."""
        self._judging = judge(begin, self._bus, self._diagnostics)
        self._training = TrainingProcess(begin, self._run, self._judging.take)
        self._follower = self._training.follower
        self._sampler = Sampler(
            begin.trainer_pid,
            begin.settings.sample_interval,
            self._bus.publish,
            self._follower,
            self._diagnostics,
            self._judging.take_children,
            self._is_told,
        )
        self._retention = Retention(
            self._run, self._settings.journal_limit, self._settings.backends
        )
        self._worst_step = WorstStepGraph(self._run, self._bus.publish, self._diagnostics)
        self._report = HelpersReport(self._run, self._bus.publish, self._diagnostics)
        self._origin = OriginReader(begin.trainer_pid, self._bus.publish, self._diagnostics)
        self._oom_kills = OomKills(begin.trainer_pid)
        self._uploaders = RunUploaders(self._run, self._settings, begin.begun_us)
        self._unwritten_ms = 0.0
        self._stop = stop
        self.ranks = RankWork(self._run, begin, self._judging.note, self._diagnostics)

    def begin(self) -> None:
        """Take the first sample, and then start the uploaders.

        The sample comes first, because a run can be short, and the start of the uploaders is slow.
        """
        self._sampler.sample_if_due()
        with contextlib.suppress(OSError):
            os.nice(10)  # now, so that the threads that start below inherit it
        if not self._begin.again:  # the first helper process has published the run's origin
            self._origin.start()
        self._uploaders.start_named()
        self.ranks.begin()

    def run(self, lines: LineReader) -> bool:
        """Work until the trainer ends, and deliver the remaining data. Return False if some data remains."""
        # The pipe closes when the trainer has sent everything, or has died.
        while lines.open and not self._is_over:
            for line in lines.read(min(TICK, self._sampler.pause)):
                self.handle(line)
            self._sampler.sample_if_due()
            self._judge_new_events()
            self._worst_step.look()
            self._origin.look()
            if self._has_trackers:
                self._report.look(self._follower.step)
            with self._diagnostics.contained("keeping the journal's size limit"):
                self._retention.enforce_if_due()
            self._allow_own_runs()
        if not self._training.is_gone:
            self._sampler.sample_short_run()
        self._worst_step.look()
        self._origin.finish()
        unjudged: dict[str, str] = {}
        with self._diagnostics.contained("judging the run a last time"):
            self._follower.look()
            # If only this process has to end, the next helper process judges the run.
            if not lines.open or self._training.has_told_its_end or self._training.is_gone_soon():
                unjudged = self._judging.finish()
        self._judging.tell_verdict()  # now, because an explanation can take seconds
        self._explain_a_bad_end(pipe_is_closed=not lines.open)
        self._judging.tell_verdict()
        self._publish_health(unjudged)
        self._publish_report(unjudged)
        self._journal.close()
        return self._uploaders.deliver_rest(self._stop)

    def _judge_new_events(self) -> None:
        """Judge the training process's new events. If it waits for a judgement, judge the steps so far."""
        with self._diagnostics.contained("judging the run"):
            asked = self._judging.asked  # before the newest events are read
            self._follower.look()
            self._judging.look()
            if asked is not None:
                if not self._training.is_gone:
                    self._sampler.sample_short_run()
                self._judging.finish(asked)

    @property
    def _is_over(self) -> bool:
        return self._training.has_told_its_end or self._stop.has_come or self._training.is_gone

    @property
    def _has_trackers(self) -> bool:
        return bool(self._uploaders or self._journal.bindings)

    def _publish_report(self, unjudged: dict[str, str]) -> None:
        """Publish the report for the run's trackers. Do nothing if the run goes on or has no tracker.

        If the run has no tracker, `report_later` makes the report. So the run's end does not wait for it.
        """
        if self._training.goes_on or not self._has_trackers:
            return
        faults = self._diagnostics.faults.total()
        self._report.publish()
        # If the report failed, the health event has to count that error, too.
        if self._diagnostics.faults.total() != faults:
            self._publish_health(unjudged)

    def report_later(self) -> None:
        """Start making the report in a child process, unless the run goes on, was short or has a tracker.

        If it has a tracker, the report is there already, and the summary is cached now, after the last event.
        """
        if self._training.goes_on:
            return
        if self._has_trackers:
            self._report.cache_summary()
        elif now_us() - self._begin.begun_us >= _WORTH_A_REPORT_US:
            make_later(self._run, self._begin.alerts_fd)

    def _explain_a_bad_end(self, *, pipe_is_closed: bool) -> None:
        """Write a report if the trainer died without an end event, or memory ran out."""
        title: str | None = None
        with self._diagnostics.contained("explaining how the run ended"):
            if self._training.has_told_its_end or self._training.is_gone_soon():
                self._follower.look()
                self._write_what_is_missing()
                if self._follower.end is None:
                    self.ranks.publish_exit(self._bus.publish)
                self.ranks.follow_to_the_end()
                if self._follower.ended_badly:
                    # Imported here: few runs end badly, and the import would delay the first sample.
                    from memlog.delivery.helper.postmortem import explain  # noqa: PLC0415
                    from memlog.reports.oom_diagnosis import Witness  # noqa: PLC0415

                    witness = Witness("helper", self._oom_kills.count())
                    failure = self.ranks.failure
                    title = explain(self._run, self._bus, witness, self._diagnostics, failure)
            elif pipe_is_closed:
                # The trainer is alive and did not report its end. So `exec` closed the pipe.
                self._follower.look()
                if self._follower.end is None:
                    self._publish_end(End(now_us(), "killed", ANOTHER_PROGRAM))
        self.ranks.follow_to_the_end()
        self.ranks.finish(title)

    def _write_what_is_missing(self) -> None:
        """If the journal lacks data after a full disk, take the data from the trainer's last message.

        The data are the end event, the counts of lost data and of errors, and the time that memlog took.
        """
        finish, written = self._training.finish, self._follower.health
        if finish is None:
            return
        last = finish.health
        written_ms = written.overhead_total_ms if written else 0.0
        self._unwritten_ms = last.overhead_total_ms - written_ms
        # A difference of Counters has positive counts only.
        dropped, faults = Counter(last.dropped), Counter(last.faults)
        self._diagnostics.dropped.update(dropped - Counter(written.dropped if written else {}))
        self._diagnostics.faults.update(faults - Counter(written.faults if written else {}))
        if self._follower.end is None:
            self._publish_end(finish.end)

    def _publish_end(self, end: End) -> None:
        self._follower.end = end
        self._uploaders.set_end(end)
        self._bus.publish(end)

    def handle(self, line: bytes) -> None:
        try:
            message = protocol.decode(line)
        except msgspec.MsgspecError as error:
            logger.warning("a message from the trainer can't be read: %s", error)
            return
        if isinstance(message, protocol.Connect):
            uploader = self._uploaders.of(message.backend)
            uploader.connect(message.connection)
            if message.connection.uri is not None:
                # For `memlog sync`, if the tracker can't be reached while the helper runs.
                uploader.state.address = bare_address(message.connection.uri)
        elif isinstance(message, protocol.Join):
            if not message.in_process:
                self._uploaders.of(message.backend).note_run(message.run)
            if message.backend in self._journal.bindings:
                self._origin.begin_another_run()
            self._told.add((message.backend, message.run.run_id, message.offset))
            self._journal.bind(message.backend, binding_of(message.run, message.offset))
        elif isinstance(message, (protocol.Ranked, protocol.Lead)):
            self._take_rank(message)
        elif isinstance(message, protocol.Settle):
            self._settle(message)
        elif isinstance(message, protocol.Finish):
            self._training.finish = message

    def _is_told(self, bindings: Mapping[str, Binding]) -> bool:
        """Return True if the trainer's messages about these runs were read."""
        return all(
            (backend, binding.run_id, binding.offset) in self._told
            for backend, binding in bindings.items()
        )

    def _settle(self, message: protocol.Settle) -> None:
        """Publish what is known of the steps so far, and a report, because a user's run begins to end."""
        settled = self._run.path / protocol.SETTLED
        with self._diagnostics.contained("settling a run"):
            # A helper that replaces another one gets all earlier messages.
            if settled.exists() and int(settled.read_text()) >= message.number:
                return
        self._sampler.sample_now()
        self._worst_step.look()
        self._origin.finish(_SETTLE_WAIT)
        self._report.publish_for(message.run_id, message.end)
        on_settled = partial(self._write_settled, message.number)
        if message.in_process:
            on_settled()
        else:
            self._uploaders.settle(message.backend, message.run_id, message.end, on_settled)

    def _write_settled(self, number: int) -> None:
        with self._diagnostics.contained("settling a run"):
            (self._run.path / protocol.SETTLED).write_text(str(number))

    def _take_rank(self, message: protocol.Ranked | protocol.Lead) -> None:
        if isinstance(message, protocol.Lead):
            self._uploaders.lead(message.backends, message.name)
            self.ranks.lead()
            return
        if message.registration.position.rank:
            self._uploaders.leave()
        self.ranks.take_registration(message.registration)

    def _allow_own_runs(self) -> None:
        begun = self._follower.since
        if begun is not None and time.monotonic() - begun >= self._settings.bind_grace:
            self._uploaders.allow_own_runs()

    def _publish_health(self, unjudged: dict[str, str]) -> None:
        """Write a health event if there is something to report.

        It contains the helper's counts of lost data and of errors, and the alert rules that were never
        judged. It also contains the counts that the trainer could not write to a full disk.
        """
        unwritten_ms = self._unwritten_ms
        if self._diagnostics.dropped or self._diagnostics.faults or unjudged or unwritten_ms:
            self._journal.append(
                Health(
                    time_us=now_us(),
                    step=self._training.finish.health.step
                    if unwritten_ms and self._training.finish
                    else self._follower.step,
                    overhead_ms=None,
                    overhead_total_ms=unwritten_ms,
                    dropped=dict(self._diagnostics.dropped),
                    faults=dict(self._diagnostics.faults),
                    unjudged=unjudged,
                )
            )


def _writer(run: RunDirectory, begin: protocol.Begin, diagnostics: Diagnostics) -> JournalWriter:
    return JournalWriter(
        run.path,
        run=run.id,
        role="helper",
        begun_us=begin.begun_us,
        initial_step=begin.settings.initial_step,
        segment_bytes=begin.settings.segment_size,
        diagnostics=diagnostics,
    )


class _WithoutCredentials(logging.Formatter):
    """Formatter that removes credentials: trackers' clients log addresses that contain them."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def main(judge: Judge) -> None:
    """Read the first message, run the helper, and exit without waiting for threads that hang in a client."""
    log = logging.StreamHandler()
    log.setFormatter(_WithoutCredentials("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer gets SIGINT, too, and sends `Finish`
    # Ignored while the helper starts: the trainer gets SIGTERM too, and the helper ends after the trainer.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines = LineReader(sys.stdin.fileno())
    begin, further = first_message(lines)
    stop = StopTime()
    try:
        helper = Helper(begin, judge, stop)
    except UnwritableDirectoryError:
        logger.exception("the helper process ends")
        logging.shutdown()
        os._exit(protocol.NO_JOURNAL)
    helper.begin()
    for line in further:
        helper.handle(line)
    signal.signal(signal.SIGTERM, stop.set)
    delivered = helper.run(lines)
    with contextlib.suppress(OSError):
        # If no process can be started, `memlog report` makes the report.
        helper.report_later()
    logging.shutdown()
    # A client's threads may hang on a dead server. The journal and the uploaders' states are on disk.
    os._exit(0 if delivered else UNDELIVERED)
