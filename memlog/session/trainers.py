"""The part of a session that trainers' callbacks use: steps, phases, and the loggers' runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memlog._internal import processes
from memlog.events import Batch, Event, SavingWay
from memlog.sink import TrackerRun

if TYPE_CHECKING:
    from memlog.session.phases import OpenPhase
    from memlog.session.recording import Recording


class TrainerInterface:
    """Methods of a session for code that runs inside the training loop. No method raises."""

    _live: Recording | None

    def step(self, step: int | None = None) -> None:
        """Report the end of a training step that memlog can't or should not detect.

        From the first call on, memlog no longer counts optimizer steps. Call this method once per step, after
        the optimizer's step. Never raises.

        Args:
            step: The trainer's own number of this step. The tracker gets the step's points under this number.
                If the number jumps ahead, the session's step number also jumps ahead. If the number goes
                back, the session continues with its own next number. ``None``: memlog numbers the step.
        """
        if self._live is not None:
            with self._live.batches.lock:
                self._live.batches.step_by_hand(step)

    def count_step(self, step: int | None = None) -> tuple[int, Batch | None] | None:
        """Report the end of a training step as `step` does; return the session's step number and the event.

        The event is ``None`` if memlog published no event for this step. The result is ``None`` if the
        session does not record, or if this process is a fork.
        """
        return None if self._live is None else self._live.batches.count(step)

    def claim_steps(self, *, only_first: bool = False) -> None:
        """Let the caller count the steps. memlog then counts no optimizer steps. Never raises.

        For code that runs inside the loop, such as a trainer's callbacks. Call this method between two steps.
        Afterwards call `count_step` or `step` once per step.

        Args:
            only_first: True: do not change who counts if the session has already recorded a step. Pass True
                if the optimizer may already have stepped in the current step.
        """
        if self._live is not None:
            self._live.claim_steps(only_first=only_first)

    def release_steps(self) -> None:
        """Let memlog count optimizer steps again, after `claim_steps`. Never raises.

        A trainer calls this method at its end. The program can then continue with a training loop of its own.
        """
        if self._live is not None:
            self._live.batches.release()

    def join_run(
        self, backend: str, run_id: str, *, uri: str | None = None, name: str | None = None
    ) -> None:
        """Send all further events to a run that one of the trainer's loggers has opened in a tracker.

        Call this method if the run is not the active run of the tracker's library. Events go to the run until
        the user opens another run or this method is called again. If the session uses other backends only,
        nothing happens. A second call for the same run changes nothing. Never raises.

        Args:
            backend: Name of the tracker's backend, such as ``"mlflow"``.
            run_id: The tracker's own id of the run.
            uri: Address of the tracker as its client expects it; ``None``: the client's current address.
            name: Display name of the run.
        """
        if self._live is not None and self._live.generation == processes.generation:
            run = TrackerRun(str(run_id), uri, name)
            self._live.runs.join(backend, run, self._live.batches.next_step)

    def will_save(
        self,
        model: Any,
        optimizers: Sequence[Any],
        way: SavingWay | None = None,
        *,
        first_at: int | None = None,
        trained_only: bool = False,
    ) -> None:
        """Tell the size of what a checkpoint will save, once, after a training's first step. Never raises.

        Args:
            model: The model.
            optimizers: The optimizers whose state is saved, after a step that has made the state.
            way: Way in which this process will save; ``None``: unknown, or another process saves.
            first_at: The trainer's number of the step after which it saves first; ``None``: unknown.
            trained_only: True if the checkpoint has only those parameters that are trained.
        """
        if self._live is not None:
            self._live.will_save(model, optimizers, way, first_at, trained_only=trained_only)

    def begin_phase(self, name: str) -> None:
        """Begin a phase that `end_phase` ends. Never raises.

        For a library that calls one hook before a phase and another hook after the phase.
        """
        self.open_phase(name)

    def end_phase(self, name: str) -> None:
        """End this thread's innermost phase called ``name``, and the phases within it. Never raises.

        Does nothing if no such phase is open.
        """
        if self._live is not None:
            self._live.phases.end_innermost(name)

    def open_phase(self, name: str) -> OpenPhase | None:
        """Begin a phase, and return the argument for `close_phase`; ``None`` if nothing is recorded."""
        return None if self._live is None else self._live.phases.begin(name)

    def close_phase(self, phase: object, error: str | None = None) -> None:
        """End a phase, unless it has ended.

        Args:
            phase: The phase, as `open_phase` returned it.
            error: Type of the exception that ended the phase; ``None``: no exception.
        """
        if self._live is not None:
            self._live.phases.end(phase, error)

    def publish(self, event: Event) -> None:
        """Publish an event of the caller on the bus. Never raises."""
        if self._live is not None:
            self._live.publish(event)
