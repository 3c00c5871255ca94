"""The helper process: holds the uploaders, samples the process tree, outlives the trainer.

It ends when the trainer has said that the run is over, or has died, and everything is delivered; where a
tracker can't be reached, after ``linger`` seconds more. What is left then stays in the journal for
``memlog sync``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import bare_address, without_credentials
from memlog.bus import EventBus
from memlog.delivery.helper import protocol
from memlog.delivery.helper.retention import Retention
from memlog.delivery.helper.sampler import Sampler, StepFollower
from memlog.delivery.helper.worst_step import WorstStep
from memlog.events import End, now_us
from memlog.events import Health as HealthEvent
from memlog.journal import Binding, JournalFile, JournalWriter, RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.probes.cgroup import OomKills
from memlog.sink import LOCAL, Backend, find_backends, load_backend, writes_in_process

if TYPE_CHECKING:
    from memlog.delivery.uploader.uploader import Uploader
    from memlog.delivery.uploader.worker import UploadWorker

logger = logging.getLogger("memlog.delivery")

TICK = 0.2
"""Seconds between looks at everything, at most."""
UNDELIVERED = 3
"""Exit code of a helper that ended before everything was delivered."""
TERM_GRACE = 20.0
"""Seconds that SIGTERM leaves: schedulers kill what they preempt about 30 s after it."""
ANOTHER_PROGRAM = "its process runs another program since (exec), without memlog.finish() before"
"""Why a run counts as killed whose process lives."""
_NICENESS = 10
_REPARENTED_WITHIN = 2.0

Judge: TypeAlias = Callable[[protocol.Begin, EventBus, Diagnostics], Callable[[], dict[str, str]]]
"""Subscribes what judges the samples by the run's alert rules, and tells of those that never were."""


class Helper:
    """One run's helper.

    Args:
        begin: The trainer's first message.
        judge: Subscribes the alert rules to the samples.
    """

    def __init__(self, begin: protocol.Begin, judge: Judge) -> None:
        self._begin = begin
        self._settings = begin.settings
        self._diagnostics = Diagnostics()
        self._run = RunDirectory(Path(begin.run_directory))
        self._lock = HelperLock(self._run)
        with self._diagnostics.contained("taking the helper's lock"):
            self._lock.take()
        self._journal = JournalWriter(
            self._run.path,
            run=self._run.id,
            role="helper",
            begun_us=begin.begun_us,
            initial_step=begin.settings.initial_step,
            segment_bytes=begin.settings.segment_size,
            diagnostics=self._diagnostics,
        )
        self._bus = EventBus(self._diagnostics)
        self._bus.subscribe(self._journal.append)
        self._follower = StepFollower(JournalFile(self._run.path, f"trainer-{begin.trainer_pid}"))
        self._sampler = Sampler(
            begin.trainer_pid,
            begin.settings.sample_interval,
            self._bus.publish,
            self._follower,
            self._diagnostics,
        )
        self._retention = Retention(
            self._run, self._settings.journal_limit, self._settings.backends
        )
        self._never_judged: Callable[[], dict[str, str]] = dict
        with self._diagnostics.contained("reading the alert rules"):
            self._never_judged = judge(begin, self._bus, self._diagnostics)
        self._worst_step = WorstStep(self._run, self._bus.publish, self._diagnostics)
        self._oom_kills = OomKills(begin.trainer_pid)
        self._uploaders: dict[str, UploadWorker] = {}
        self._last_words: protocol.Finish | None = None
        self._unsaid_ms = 0.0
        self._stop_at: float | None = None

    def begin(self) -> None:
        """Samples, since a run may be short, and begins then what takes its time."""
        self._sampler.sample_if_due()
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)  # of threads that are there already it would change nothing
        for name in self._settings.backends:
            if name != LOCAL:
                self._start_uploader(name, load_backend(name), named=True)

    def run(self, lines: LineReader) -> bool:
        """Works until the trainer is over and all is delivered, or can't be for now; says which."""
        signal.signal(signal.SIGTERM, self._stop)
        # The trainer closes the pipe when it has said everything, or is gone.
        while lines.open and not self._trainer_is_over():
            for line in lines.read(min(TICK, self._sampler.pause)):
                self.hear(line)
            self._sampler.sample_if_due()
            self._worst_step.look()
            with self._diagnostics.contained("keeping the journal's size limit"):
                self._retention.enforce_if_due()
            self._allow_own_runs()
        self._worst_step.look()
        self._explain_a_bad_end()
        self._publish_health()
        self._journal.close()
        return self._deliver_rest()

    def _explain_a_bad_end(self) -> None:
        """Where the trainer is gone without a word, or memory ran out: says what can be said of it."""
        with self._diagnostics.contained("explaining how the run ended"):
            if self._last_words is not None or self._trainer_is_gone():
                self._follower.look()
                self._write_what_is_missing()
                if self._follower.ended_badly:
                    # Imported here: few runs end badly, and the first sample would wait for it.
                    from memlog.delivery.helper.postmortem import explain  # noqa: PLC0415
                    from memlog.reports.oom_diagnosis import Witness  # noqa: PLC0415

                    witness = Witness("helper", self._oom_kills.count())
                    explain(self._run, self._bus, witness, self._diagnostics)
            elif self._run.was_replaced():
                self._follower.look()
                if self._follower.end is None:
                    self._say_the_end(End(now_us(), "killed", ANOTHER_PROGRAM))

    def _write_what_is_missing(self) -> None:
        """The end of a journal that found no room for it."""
        words, told = self._last_words, self._follower.health
        if words is None:
            return
        said = words.health
        self._unsaid_ms = said.overhead_total_ms - (told.overhead_total_ms if told else 0.0)
        _add(self._diagnostics.dropped, said.dropped, told.dropped if told else {})
        _add(self._diagnostics.faults, said.faults, told.faults if told else {})
        if self._follower.end is None:
            self._say_the_end(words.end)

    def _say_the_end(self, end: End) -> None:
        self._follower.end = end
        for thread in self._uploaders.values():
            thread.uploader.end = end
        self._bus.publish(end)

    def _trainer_is_gone(self) -> bool:
        """Its end of the pipe closes a moment before its children get another parent."""
        deadline = time.monotonic() + _REPARENTED_WITHIN
        while os.getppid() == self._begin.trainer_pid:
            if time.monotonic() >= deadline:
                return False
            time.sleep(TICK / 10)
        return True

    def _trainer_is_over(self) -> bool:
        # A child whose parent dies gets another: that can't be mistaken, unlike a process number.
        told_to_stop = self._stop_at is not None and time.monotonic() >= self._stop_at
        return (
            self._last_words is not None or told_to_stop or os.getppid() != self._begin.trainer_pid
        )

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Told to end, it goes on beside a trainer that saves its work, and flushes; but not for long."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + TERM_GRACE

    def hear(self, line: bytes) -> None:
        """Acts on one message of the trainer's."""
        try:
            message = protocol.decode(line)
        except msgspec.MsgspecError as error:
            logger.warning("a message from the trainer can't be read: %s", error)
            return
        if isinstance(message, protocol.Connect):
            uploader = self._uploader(message.backend)
            uploader.connect(message.connection)
            if message.connection.uri is not None:
                # For `memlog sync`, later and elsewhere, should the tracker not be reached before.
                uploader.state.address = bare_address(message.connection.uri)
        elif isinstance(message, protocol.Bind):
            self._uploader(message.backend).know(message.run)
            uri = None if message.run.uri is None else bare_address(message.run.uri)
            self._journal.bind(message.backend, Binding(message.run.run_id, uri, message.run.name))
        elif isinstance(message, protocol.WrittenInProcess):
            self._journal.bind(message.backend, Binding(message.run_id, message.uri, message.name))
        elif isinstance(message, protocol.Finish):
            self._last_words = message

    def _uploader(self, name: str) -> Uploader:
        if name not in self._uploaders:
            self._start_uploader(name, find_backends()[name], named=False)
        return self._uploaders[name].uploader

    def _start_uploader(self, name: str, backend: Backend, *, named: bool) -> None:
        # Imported here: the first sample would wait for it.
        from memlog.delivery.in_process.saved_state import claims_while_in_process  # noqa: PLC0415
        from memlog.delivery.uploader.uploader import Uploader  # noqa: PLC0415
        from memlog.delivery.uploader.worker import UploadWorker  # noqa: PLC0415

        uploader = Uploader(
            self._run,
            name,
            backend.open_sink,
            project=self._settings.project,
            name=self._settings.name,
            begun_us=self._begin.begun_us,
            claim=claims_while_in_process if writes_in_process(backend) else None,
        )
        # The client takes seconds to import: a named backend will need it, another perhaps never, nor one
        # whose users' runs are written in process.
        thread = UploadWorker(
            uploader, backend.prepare if named and not writes_in_process(backend) else None
        )
        self._uploaders[name] = thread
        thread.start()

    def _allow_own_runs(self, *, now: bool = False) -> None:
        begun = self._follower.since
        waited = begun is not None and time.monotonic() - begun >= self._settings.bind_grace
        if now or waited:
            for name in self._settings.backends:
                if name in self._uploaders:
                    self._uploaders[name].uploader.may_open_own = True

    def _publish_health(self) -> None:
        """Its own drops, faults and unjudged rules, and what the trainer's journal had no room for."""
        unjudged, unsaid_ms = self._never_judged(), self._unsaid_ms
        if self._diagnostics.dropped or self._diagnostics.faults or unjudged or unsaid_ms:
            self._journal.append(
                HealthEvent(
                    time_us=now_us(),
                    step=self._last_words.health.step
                    if unsaid_ms and self._last_words
                    else self._follower.step,
                    overhead_ms=None,
                    overhead_total_ms=unsaid_ms,
                    dropped=dict(self._diagnostics.dropped),
                    faults=dict(self._diagnostics.faults),
                    unjudged=unjudged,
                )
            )

    def _deliver_rest(self) -> bool:
        self._allow_own_runs(now=True)
        for uploader in self._uploaders.values():
            uploader.complete()
        linger = self._settings.linger if self._run.path.exists() else 0  # nothing is left to bring
        deadline = time.monotonic() + linger
        for uploader in self._uploaders.values():
            while not uploader.join(TICK):
                for other in self._uploaders.values():
                    other.make_way_if_wanted()
                if time.monotonic() >= min(deadline, self._stop_at or deadline):
                    return False
        return all(uploader.delivered for uploader in self._uploaders.values())


def _add(counts: Counter[str], said: Mapping[str, int], told: Mapping[str, int]) -> None:
    """Counts what the trainer has said, and its journal has not told."""
    for cause, count in said.items():
        if count > told.get(cause, 0):
            counts[cause] += count - told.get(cause, 0)


class LineReader:
    """Reads whole lines from a pipe without waiting longer than asked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(fd, selectors.EVENT_READ)
        self.open = True

    def read(self, timeout: float) -> Iterator[bytes]:
        """The lines that arrive within ``timeout`` seconds; returns after the first arrival."""
        if not self.open:
            time.sleep(timeout)
            return
        if not self._selector.select(timeout):
            return
        data = os.read(self._fd, 65536)
        if not data:
            self.open = False
            self._selector.unregister(self._fd)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines


class _WithoutCredentials(logging.Formatter):
    """Keeps out of the log what trackers' clients say of their addresses."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def main(judge: Judge) -> None:
    """Reads the first message, works, and leaves without waiting for threads that hang in a client."""
    log = logging.StreamHandler()
    log.setFormatter(_WithoutCredentials("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer hears it and tells us what follows
    # A job that is told to end while we come up: what the trainer does then says when we are to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines = LineReader(sys.stdin.fileno())
    begin, rest = _first_message(lines)
    helper = Helper(begin, judge)
    helper.begin()
    for line in rest:
        helper.hear(line)
    delivered = helper.run(lines)
    logging.shutdown()
    # A client's threads may hang on a dead server; everything that counts is on disk.
    os._exit(0 if delivered else UNDELIVERED)


def _first_message(lines: LineReader) -> tuple[protocol.Begin, list[bytes]]:
    while lines.open:
        received = list(lines.read(TICK))
        if received:
            begin = protocol.decode(received[0])
            if isinstance(begin, protocol.Begin):
                return begin, received[1:]
            break
    raise SystemExit(
        "memlog's helper process is started by memlog.init(), with its settings on stdin"
    )
