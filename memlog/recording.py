"""A run being recorded: where the parts are put together, and taken apart again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memlog import forks
from memlog.autolog import Autolog
from memlog.batches import BatchRecorder
from memlog.bus import EventBus
from memlog.console import Console
from memlog.delivery.binder import Binder
from memlog.events import Alert, End, Epoch, Evaluation, Event, Run, Status, now_us
from memlog.health import Health
from memlog.journal import JournalWriter, new_run
from memlog.settings import Settings
from memlog.sink import LOCAL, Backend, Sink, find_backends, load_backend

if TYPE_CHECKING:
    from memlog.delivery.launcher import HelperProcess, Outcome
    from memlog.delivery.loop import CourierThread

AlertCallback: TypeAlias = Callable[[Alert], object]

_SAY_WAITING_AFTER = 1.0
"""Seconds of waiting in ``finish`` after which a line says for what."""


class Recording:
    """The parts of a session that records.

    Args:
        settings: What `init` made of its arguments.
        health: Counts what goes wrong in this process.
        sinks: Sinks that were handed over as objects.
        model: Its size is recorded once.
        on_alert: Gets every alert.

    Attributes:
        run: The run's folder.
        batches: Makes the batch events.

    Raises:
        MemlogError: see `init`.
    """

    def __init__(
        self,
        settings: Settings,
        health: Health,
        sinks: Sequence[Sink],
        model: Any,
        on_alert: AlertCallback | None = None,
    ) -> None:
        self._generation = forks.generation
        self._health = health
        backends = _backends(settings)
        begun_us = now_us()
        self.run = new_run(Path(settings.directory))
        self._journal = JournalWriter(
            self.run.path,
            run=self.run.id,
            role="trainer",
            begun_us=begun_us,
            initial_step=settings.initial_step,
            segment_bytes=settings.segment_size,
            limit=settings.journal_limit,
            health=health,
        )
        self._helper = self._start_helper(settings, begun_us, health)
        self._binder = Binder(backends, self._journal, self._helper.tell, health)
        self._bus = EventBus(health)
        self._bus.subscribe(self._journal.append)
        self._console: Console | None = None
        if settings.verbose_batches or settings.alerts:
            self._console = Console(settings.verbose_batches)
            self._bus.subscribe(self._console)
        if settings.alerts:
            self._judge(settings.alerts, on_alert)
        names = _sink_names(sinks, taken=settings.backends)
        self._threads = [self._courier_thread(*pair) for pair in zip(names, sinks, strict=True)]
        self._bus.publish(_run_event(settings, begun_us))
        self.batches = BatchRecorder(
            settings, self._bus, self._journal, self._binder, health, model
        )
        self._autolog = Autolog(self.batches.optimizer_stepped)
        self._binder.glance()

    def _judge(self, alerts: Sequence[str], on_alert: AlertCallback | None) -> None:
        from memlog.alerts import engine_for, parse_rules  # noqa: PLC0415 - for those who have rules

        engine = engine_for(
            parse_rules(alerts), self._bus.publish, self._health, pid=os.getpid(), on_alert=on_alert
        )
        if engine is not None:
            self._bus.subscribe(engine)

    def publish(self, event: Event) -> None:
        """Puts an event on the bus, in the process that began the session."""
        if forks.generation == self._generation:
            self._binder.look()
            if isinstance(event, (Epoch, Evaluation)):
                self.batches.begin()
            self._bus.publish(event)

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str, name: str | None
    ) -> Path | None:
        """Keeps a file in the run's folder and publishes that it is there."""
        from memlog.journal.kept import keep  # noqa: PLC0415 - most trainers keep no file

        kept: Path | None = None
        if forks.generation == self._generation:
            with self._health.contained("keeping an artifact"):
                artifact = keep(self.run, Path(path), name, kind)
                self.publish(artifact)
                kept = self.run.path / artifact.path
        return kept

    def claim_steps(self) -> None:
        """The caller counts, and prints its own lines."""
        self.batches.claim()
        if self._console is not None:
            self._console.silence()

    def finish(self, status: Status, timeout: float) -> None:
        """Takes everything out of the trainer's process and hands the rest to the helper."""
        if forks.generation != self._generation:
            return  # a fork's copy: the run is its parent's
        self._autolog.remove()
        self.batches.say_if_nothing_was_noticed()
        self.batches.publish_health()
        self._bus.publish(End(now_us(), status))
        self._binder.connect()
        self._journal.close()
        self._say_what_was_lost()
        deadline = time.monotonic() + timeout
        outcome = self._helper.finish(timeout, _Waiting(timeout))
        for thread in self._threads:
            thread.complete()
            if not thread.join(max(deadline - time.monotonic(), min(timeout, 1.0))):
                outcome = "at work" if outcome == "delivered" else outcome
        self._say_what_is_left(outcome, timeout)

    def _say_what_was_lost(self) -> None:
        """A journal that was cut short can't tell: its last words found no room either."""
        lost = sum(n for reason, n in self._health.dropped.items() if reason.startswith("journal_"))
        if lost:
            _say(f"{lost} events of run {self.run.id} could not be written and are lost")

    def _say_what_is_left(self, outcome: Outcome, timeout: float) -> None:
        if (
            outcome == "dead" and self.run.path.exists()
        ):  # where it is gone there is nothing to bring
            _say(
                "the helper process ended before everything was delivered: "
                f"`memlog sync {self.run.id}` brings what is left"
            )
        elif outcome == "at work" and timeout:
            _say(
                f"not everything is delivered after {timeout:g} s; it goes on in the background: "
                f"`memlog show {self.run.id}` says how far it is, `memlog sync {self.run.id}` brings "
                "what is left"
            )

    def _start_helper(self, settings: Settings, begun_us: int, health: Health) -> HelperProcess:
        # Imported here: `import memlog` stays light for those who never begin a session.
        from memlog.delivery.launcher import HelperProcess  # noqa: PLC0415
        from memlog.delivery.messages import Begin  # noqa: PLC0415

        return HelperProcess(Begin(str(self.run.path), begun_us, os.getpid(), settings), health)

    def _courier_thread(self, name: str, sink: Sink) -> CourierThread:
        """A sink that was handed over as an object lives in this process."""
        from memlog.delivery.courier import Courier  # noqa: PLC0415 - most trainers hold none
        from memlog.delivery.loop import CourierThread  # noqa: PLC0415

        thread = CourierThread(Courier(self.run, name, lambda _: sink, may_open_own=True))
        thread.start()
        return thread


class _Waiting:
    """Says once that ``finish`` is waiting."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._said = False

    def __call__(self, waited: float) -> None:
        if waited >= _SAY_WAITING_AFTER and not self._said:
            self._said = True
            _say(f"delivering the last points (at most {self._timeout:g} s)")


def _say(message: str) -> None:
    if sys.stderr is not None:  # a program without a terminal has none
        sys.stderr.write(f"memlog: {message}\n")


def _sink_names(sinks: Sequence[Sink], taken: Sequence[str]) -> list[str]:
    """A name for each sink that was handed over as an object: its class's, numbered where that is taken."""
    names: list[str] = []
    for sink in sinks:
        name = base = type(sink).__name__.lower()
        number = 1
        while name in taken or name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _backends(settings: Settings) -> dict[str, Backend]:
    """The backends to look for runs in: those named, or all that are installed."""
    if settings.backends:
        return {name: load_backend(name) for name in settings.backends if name != LOCAL}
    return find_backends()


def _run_event(settings: Settings, begun_us: int) -> Run:
    return Run(
        time_us=begun_us,
        name=settings.name,
        project=settings.project,
        backends=settings.backends,
        settings=settings.described(),
    )
