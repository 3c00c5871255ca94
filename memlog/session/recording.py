"""Recording of a run: publishes events, and stops the parts of the recording in order."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import rank_position
from memlog.autolog.saved_state import saved_state
from memlog.delivery.helper.protocol import Settling, settled_until
from memlog.events import (
    End,
    Epoch,
    Evaluation,
    Event,
    Health,
    Phase,
    Recorded,
    SavingWay,
    Scope,
    Status,
    now_us,
)
from memlog.journal.artifacts import Names, keep, not_kept, renamed
from memlog.session.arguments import Labels
from memlog.session.exit import print_end, print_lost_events, reason_of, status_of
from memlog.session.recording_parts import AlertCallback, RecordingParts
from memlog.settings import Settings
from memlog.sink import Sink

_RESERVE = 4 * 1024**2
"""Bytes of address space that memlog reserves and never touches. memlog releases them when a run
ends. So memlog can describe the end even if memory has run out."""


class Recording(RecordingParts):
    """Recording of one run. The arguments are those of `RecordingParts`."""

    def __init__(
        self,
        settings: Settings,
        diagnostics: Diagnostics,
        sinks: Sequence[Sink],
        model: Any,
        on_alert: AlertCallback | None,
        on_in_process: Callable[[], object],
    ) -> None:
        self._closed = False
        self._labels = Labels(diagnostics)
        self._names = Names()
        self._published = False
        self._told_error: tuple[int, int | None] | None = None
        self._reserve: bytearray | None = bytearray(_RESERVE)
        connections = self.publish, on_alert, on_in_process, self.settle
        super().__init__(settings, diagnostics, sinks, model, *connections)
        known = (lambda: None) if model is None else weakref.ref(model)
        self.batches.tell_size = lambda: self.will_save(known(), self._autolog.clock.optimizers)

    def publish(self, event: Event) -> None:
        """Publish an event on the bus, unless this process is a fork of the one that began the session."""
        if processes.generation == self.generation:
            self.runs.join_new_runs(self.batches.next_step)
            if isinstance(event, (Epoch, Evaluation)):
                self.batches.parameters.publish_without_step()
            elif isinstance(event, (Scope, Recorded)):
                event = self._labels.with_step(event, self.batches.last_step)
            elif isinstance(event, Phase):
                event = self._labels.with_step(event, self.batches.last_or_first_step)
            self._published = True
            self._bus.publish(event)
            reader = self._requests.reader
            if reader is not None and reader.pending:
                self._requests.take()
            self._check_helper_if_due(time.perf_counter_ns())

    def snapshot(self) -> None:
        if processes.generation == self.generation:
            if self._scheduler is None:
                self._scheduler = self._begin_tracing(0.0, None)
            self._scheduler.want()

    def save_artifact(
        self, path: str | os.PathLike[str], kind: str, name: str | None
    ) -> Path | None:
        """Copy a file into the run's folder and publish its event; return the copy's path, if any."""
        if processes.generation != self.generation:
            return None
        try:
            file = Path(path)
            artifact = keep(self.run, file, name, kind, self._names)
        except Exception as error:  # noqa: BLE001 - the trainer's step must not fail on a report
            self._diagnostics.drop_each("artifact_not_kept", not_kept(path, error))
            return None
        message = renamed(artifact, file.name if name is None else name, kind)
        if message is not None:
            self._diagnostics.say_once(message, message)
        self.publish(artifact)
        return self.run.path / artifact.path

    def will_save(
        self,
        model: Any,
        optimizers: Sequence[Any],
        way: SavingWay | None = None,
        first_at: int | None = None,
        *,
        trained_only: bool = False,
    ) -> None:
        """Publish the size of what a checkpoint saves. ``model`` is ``None`` if it is unknown."""
        if processes.generation != self.generation or (model is None and not optimizers):
            return
        with self._diagnostics.contained("reading the size of a checkpoint"):
            position = rank_position()
            state = saved_state(
                model,
                optimizers,
                ranks=1 if position is None else position.world_size,
                step=self.batches.last_step,
                way=way,
                first_at=first_at,
                trained_only=trained_only,
            )
            if state is not None:
                self._bus.publish(state)

    def claim_steps(self, *, only_first: bool) -> None:
        """Let the caller count the steps.

        memlog's monitors pass ``only_first=True``. A monitor counts the steps only if no step was recorded
        before. After a monitor's call, the session prints no more lines about batches, because the monitor
        prints lines of its own.
        """
        self.batches.claim(only_first=only_first)
        if only_first and self._console is not None:
            self._console.stop_printing_batches()

    def finish(self, status: Status, timeout: float, error: BaseException | None) -> None:
        """End the recording in the training process and leave further delivery to the helper process.

        Wait at most ``timeout`` seconds for delivery. ``error`` is the exception that ended the run, or that
        is being raised.
        """
        if processes.generation != self.generation:
            self._autolog.remove()  # so that the copy says nothing of the child's steps
            return  # a forked copy: the run belongs to the parent process
        end, health = self._close(status, error, timeout)
        self._closed = True
        try:
            # Without data, as after `--help`, no tracker gets a run. The helper process ends alone.
            self._delivery.finish(end, health, timeout if self._has_data else 0)
            with self._diagnostics.contained("printing the last lines"):
                self._print_end(end)
        finally:
            self._requests.close()

    @property
    def _has_data(self) -> bool:
        return self.batches.last_step is not None or self._published or self._ran_out

    def _print_end(self, end: End) -> None:
        has_data = self._has_data
        one_line, verdict = self._messages.has_one_line, None
        silent = self._messages.is_silent and not one_line
        if self.run.path.exists() and (self._requests.has_found if silent else has_data):
            verdict = self._requests.verdict(self.run, end)
        print_end(self.run, verdict, has_data=has_data, silent=silent, one_line=one_line)

    def settle(self, backend: str, run_id: str, status: Status) -> Settling | None:
        """Settle the verdict on the steps so far, because a user's run in a tracker begins to end.

        Never raises. The session goes on, and judges again if more steps follow. ``run_id`` is the tracker's
        id of the run. ``status`` is how the tracker ends it. An exception that is being raised counts more.

        Return the helper process's part of the work, for which the caller can wait. Return ``None`` if the
        verdict can't be settled, because later events belong to another run, or memlog's run has ended.
        """
        if (
            self._closed
            or processes.generation != self.generation
            or not self.runs.is_newest(backend, run_id)
        ):
            return None
        error, last_step = sys.exc_info()[1], self.batches.last_step
        status = status if error is None else status_of(error)
        settling: Settling | None = None
        end, until = End(now_us(), status, reason_of(status, error)), settled_until()
        with self._diagnostics.contained("settling the verdict"):
            self.runs.note_names()
            self._inputs.finish(last_step)
            if error is not None:
                self._tell_of_error(error)
            self._requests.settle(until, self._delivery.ask_to_judge)
            self.batches.health.publish(last_step, {})
            settling = self._delivery.settle(backend, run_id, end, until)
        return settling  # noqa: RET504 - it stays None after an error

    def _tell_of_error(self, error: BaseException | None) -> None:
        """Publish the failed allocation that ended a run, if one did. Publish it once for each error."""
        known = (id(error), self.batches.last_step)
        if known != self._told_error:
            self._told_error = known
            self._allocator.run_ended(error)

    def _close(
        self, status: Status, error: BaseException | None, timeout: float
    ) -> tuple[End, Health]:
        """Stop every part, and return the run's last events."""
        self._reserve = None
        contained = self._diagnostics.contained
        with contained("removing the optimizer hooks"):
            self._autolog.remove()
        self._allocator.stop()
        self.runs.watch_no_ends()
        if self._scheduler is not None:
            with contained("ending the tracing of steps"):
                self._scheduler.finish(failed=status != "finished")
        self._inputs.finish(self.batches.last_step)
        self._tell_of_error(error)
        self._unmarked.stop()
        self._loaders.stop()
        if self._phases is not None:
            self._phases.end_all()
        self._requests.finish(
            self.batches.last_step, timeout, self._delivery.ask_to_judge, self.run
        )
        with contained("looking for the ranks' lowest one"):
            stepped = self.batches.last_step is not None
            if self._delivery.lead_if_lowest(self._rank, has_stepped=stepped, is_final=True):
                self.runs.join_new_runs(self.batches.next_step)
        self.runs.note_names()
        if self.batches.last_step is not None:
            self.runs.note_last_step(self.batches.last_step)
        self.batches.publish_pinned()
        health = self._publish_summary(is_orderly=status == "finished" and error is None)
        end = End(now_us(), status, reason_of(status, error))
        self._bus.publish(end)
        if self._rank.may_deliver:
            self.runs.connect()
        with contained("closing the journal"):
            self._journal.close()
        self.batches.host.close()
        self.batches.requests = None
        print_lost_events(self.run, self._diagnostics)
        return end, health

    def finish_after_interruption(self, status: Status) -> None:
        """Send the run's end to the helper process if an interruption stopped `finish` too early.

        An interruption is Ctrl-C or an exception of a signal handler. After an interruption, the journal may
        lack the run's end.
        """
        if self._closed or processes.generation != self.generation:
            return
        with self._diagnostics.contained("removing the optimizer hooks"):
            self._autolog.remove()
        with self._diagnostics.contained("closing the journal"):
            self._journal.close()
        with self._diagnostics.contained("sending the end of the run"):
            self._delivery.send_end(End(now_us(), status), _empty_health(), 0)
        self._delivery.print_undelivered("at work", 0.1)

    def _publish_summary(self, *, is_orderly: bool) -> Health:
        """Publish memlog's own cost and errors, and print the messages about the whole run.

        ``is_orderly`` is False if the run failed, or an exception is being raised.
        """
        health = _empty_health()
        with self._diagnostics.contained("publishing the run's health"):
            self._helper.look_at_last()
            unjudged: Mapping[str, str] = {}
            if self._settings.alerts:
                unjudged = self._requests.print_unjudged_rules(self._helper.is_away)
            health = self.batches.health.publish(self.batches.last_step, unjudged)
            if is_orderly and not self._published:
                self.batches.warn_if_no_steps(self.run)
        return health


def _empty_health() -> Health:
    return Health(now_us(), None, None, 0.0, {}, {})
