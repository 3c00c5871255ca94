"""Writing to a run of the user's in the trainer's process, beside the user's own rows.

Whoever calls ``run.log(values)`` beside a user who passes ``step=`` destroys the user's rows; with
``commit=False`` the values join the row that happens to be open, which another thread can't know. So memlog's
values travel in the call by which the user logs (`memlog_wandb.rows`), and the user's rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.events import Alert, Artifact
from memlog.sink import Point, Rows
from memlog_wandb import contents
from memlog_wandb.rows import RowWatch, watch, watches_no_more


class WandbInProcessRun:
    """A `memlog.sink.InProcessRun` on a W&B run. Importing this module loads no wandb.

    Args:
        run: The user's ``wandb.run``.
        run_id: Its id.
    """

    def __init__(self, run: Any, run_id: str) -> None:
        self.run_id = run_id
        self._run = run
        self._watch: RowWatch | None = None

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

    def watch_rows(self, rows: Rows) -> int | None:
        """Adds points to what the user logs, from now on.

        Returns:
            The number of the row that is open, where the user has logged with ``step=`` before.
        """
        self._watch = watch(self._run, rows)
        telemetry = getattr(self._run, "_telemetry_obj", None)
        numbered = getattr(getattr(telemetry, "feature", None), "set_step_log", False)
        return int(self._run._local_step) if numbered else None  # noqa: SLF001 - `run.step` asks the server

    def leave_rows(self) -> None:
        """Adds nothing any more."""
        if self._watch is not None:
            watches_no_more(self._run, self._watch)

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Puts points into the open row, or into one behind it. Raises where the run is finished.

        A new row has a step, as the user's have that it follows: without one the values would join theirs.
        """
        if self._watch is not None:
            self._watch.put(points, new_row=new_row)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Puts parameters into the run's configuration, under ``memlog/``."""
        contents.log_parameters(self._run, parameters)

    def log_alert(self, alert: Alert) -> None:
        """Sends an alert."""
        contents.log_alert(self._run, alert)

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Hands an artifact over; W&B uploads it in its own time, at the latest as the run finishes."""
        contents.log_artifact(self._run, artifact, file, memlog_run)
