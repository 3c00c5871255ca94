"""Riding on a run of the user's: written beside the user, in the trainer's process.

Whoever calls ``run.log(values)`` beside a user who passes ``step=`` destroys the user's rows. With
``commit=False``, and never a step, the values join the row that the user is about to commit, and the
user's rows stay as they are. Within a row the last write wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.events import Alert, Artifact
from memlog.sink import Point
from memlog_wandb import contents


class WandbRide:
    """A `memlog.sink.Ride` on a W&B run. Importing this module loads no wandb.

    Args:
        run: The user's ``wandb.run``.
        run_id: Its id.
    """

    def __init__(self, run: Any, run_id: str) -> None:
        self.run_id = run_id
        self._run = run
        self._definitions = contents.Definitions(run)

    @property
    def is_open(self) -> bool:
        """Whether the user has not finished the run."""
        return not getattr(self._run, "_is_finished", False)

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Adds to wandb's own list of what is to be called when a run ends, as its Jupyter half does."""
        hooks = getattr(self._run, "_teardown_hooks", None)
        if isinstance(hooks, list):
            from wandb.sdk.wandb_run import (  # noqa: PLC0415 - whoever has a run has imported it
                TeardownHook,
                TeardownStage,
            )

            for call, stage in ((before, TeardownStage.EARLY), (after, TeardownStage.LATE)):
                hooks.append(TeardownHook(call, stage))  # type: ignore[arg-type] # wandb uses no result

    def row(self) -> object | None:
        """What changes when the user commits a row; ``None`` where this wandb does not tell.

        It is W&B's own count in this process. The public ``run.step`` asks the server.
        """
        return getattr(self._run, "_local_step", None)

    def log(self, points: Sequence[Point]) -> None:
        """Puts the points into the row that the user commits next. Raises where the run is finished."""
        kept = [point for point in points if contents.is_storable(point)]
        if kept:
            self._definitions.add(kept)
            self._run.log(contents.row_of(kept), commit=False)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Puts parameters into the run's configuration, under ``memlog/``."""
        contents.log_parameters(self._run, parameters)

    def log_alert(self, alert: Alert) -> None:
        """Sends an alert."""
        contents.log_alert(self._run, alert)

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Hands an artifact over; W&B uploads it in its own time, at the latest as the run finishes."""
        contents.log_artifact(self._run, artifact, file, memlog_run)
