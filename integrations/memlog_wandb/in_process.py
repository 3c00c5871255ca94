"""Write to a user's run from the training process, and keep the user's rows unchanged.

memlog can't simply call ``run.log(values)``. If the user logs with ``step=``, memlog's call would close the
user's row, and W&B would drop the user's further values for this row. If memlog passed ``commit=False``,
memlog's values would go into the row that is open at that moment. memlog's thread can't know which row that
is. So memlog adds its values to the user's own calls (`memlog_wandb.rows`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlog.events import Alert, Artifact
from memlog.sink import Point, Rows
from memlog_wandb import contents
from memlog_wandb.rows import RowWatch, unwatch, watch


class WandbInProcessRun:
    """A `memlog.sink.InProcessRun` on a W&B run. Importing this module does not import wandb.

    Args:
        run: The user's ``wandb.run``.
        run_id: The run's id.
    """

    def __init__(self, run: Any, run_id: str) -> None:
        self.run_id = run_id
        self._run = run
        # True with ``sync_tensorboard=True``. W&B's own process then reads the rows from TensorBoard's files.
        self.copies_rows = bool(getattr(sys.modules.get("wandb"), "patched", {}).get("tensorboard"))
        self._watch: RowWatch | None = None

    @property
    def is_open(self) -> bool:
        """True if the user has not finished the run."""
        return not getattr(self._run, "_is_finished", False)

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Let wandb call ``before`` while the run is still open, and ``after`` when the run has ended.

        wandb's Jupyter integration uses the same hooks.
        """
        hooks = getattr(self._run, "_teardown_hooks", None)
        if isinstance(hooks, list):
            from wandb.sdk.wandb_run import (  # noqa: PLC0415 - imported already, since there is a run
                TeardownHook,
                TeardownStage,
            )

            for call, stage in ((before, TeardownStage.EARLY), (after, TeardownStage.LATE)):
                hooks.append(TeardownHook(call, stage))  # type: ignore[arg-type] # wandb uses no result

    def watch_rows(self, rows: Rows) -> int | None:
        """Begin to add points to the user's rows. Return the open row's number.

        The result is ``None`` if the user has set no number of a row so far.
        """
        self._watch = watch(self._run, rows)
        telemetry = getattr(self._run, "_telemetry_obj", None)
        numbered = getattr(getattr(telemetry, "feature", None), "set_step_log", False)
        return int(self._run._local_step) if numbered else None  # noqa: SLF001 - `run.step` asks the server

    def leave_rows(self) -> None:
        """Stop adding points to the rows that the user logs."""
        if self._watch is not None:
            unwatch(self._run, self._watch)

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Put points into the open row, or into a new row after it. Raises if the run is finished.

        For a new row, memlog passes the row's number to W&B. Without a number, W&B would put the values into
        the user's open row.
        """
        if self._watch is not None:
            self._watch.put(points, new_row=new_row)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Put parameters into the run's configuration, under ``memlog/``."""
        contents.log_parameters(self._run, parameters)

    def log_alert(self, alert: Alert) -> None:
        """Send an alert."""
        contents.log_alert(self._run, alert)

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
        """Log an artifact. W&B uploads it in the background, at the latest when the run finishes."""
        contents.log_artifact(self._run, artifact, file, memlog_run)
