"""Sink for one of memlog's own W&B runs. The sink runs in a process of memlog's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from memlog._internal.connections import patience
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import TrackerRejectedError
from memlog.events import Alert, Artifact, Status
from memlog.sink import Point, Resolution, Target, TrackerRun
from memlog_wandb import contents
from memlog_wandb.addresses import RunPath, address_of, link_to, run_path
from memlog_wandb.errors import rows_given_up, translated, unavailable
from memlog_wandb.probe import probe

INIT_TIMEOUT = 20.0
"""Maximum seconds to open a run. wandb's own default is longer."""
FINISH_TIMEOUT = 60.0
"""Maximum seconds to upload the remaining data when a run ends, unless the user has set a timeout."""
ARTIFACT_TIMEOUT = 120
"""Maximum seconds to upload a file."""
_PROBE_INTERVAL = 30.0
"""Minimum seconds between checks of the server while a run is open. Frequent checks are not needed, because
wandb itself buffers data and tries again."""

_EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "killed": 255}


class WandbSink:
    """A `memlog.sink.Sink` for W&B. Its methods raise the errors that `Sink` names.

    The sink writes only to memlog's own runs. A user's run gets its data from the training process. wandb
    uploads in the background, so no data is safe until the run has finished.

    Args:
        target: The run to write to.

    Attributes:
        dropped: Number of points left out so far, by reason. The only reason is ``not_finite``: the value is
            infinite or NaN, which would break a chart.
    """

    durable = False
    resolution: Resolution = "full"
    max_points = 1000

    def __init__(self, target: Target) -> None:
        self._diagnostics = Diagnostics()
        self.dropped: Mapping[str, int] = self._diagnostics.dropped
        self._target = target
        self._run: _OpenRun | None = None
        self._broken = False
        self._settings = wandb.setup().settings  # from the environment and wandb's files
        self._asked = 0.0

    @property
    def keeps_files(self) -> bool:
        """True if files must stay at their paths, because ``wandb sync`` uploads them from there later."""
        return self._settings.mode not in ("online", "shared")

    def probe(self) -> None:
        """Check whether the server can be reached. This takes about two seconds at most.

        Nothing is checked in offline mode, or if the last check was less than `_PROBE_INTERVAL` seconds ago.
        """
        due = self._run is None or time.monotonic() - self._asked >= _PROBE_INTERVAL
        if self._settings.mode in ("online", "shared") and due:
            probe(self._settings.base_url)
            self._asked = time.monotonic()

    def open(self) -> TrackerRun:
        """Open memlog's own run, or resume it."""
        run = self._opened().run
        settings = run._settings  # noqa: SLF001 - `settings` is a copy that takes a millisecond
        name = getattr(settings, "run_name", None)
        return TrackerRun(str(run.id), address_of(settings), name, link_to(settings))

    def log_points(self, points: Sequence[Point]) -> None:
        """Store points. Consecutive points of one step, evaluation or epoch form a row.

        A row gets the time of its first point.

        Args:
            points: At most `max_points` points.
        """
        opened = self._opened()
        kept = [point for point in points if self._is_storable(point)]
        with translated():
            opened.definitions.add(kept)
            for row in _rows(kept):
                values = {**contents.row_of(row), "_timestamp": row[0].time_us / 1e6}
                opened.run.log(values)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store parameters in the run's configuration, under ``memlog/``."""
        with translated():
            contents.log_parameters(self._opened().run, parameters)

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Send the new alerts. In offline mode, ``wandb sync`` sends them later."""
        with translated():
            for alert in alerts[first_new:]:
                contents.log_alert(self._opened().run, alert)

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Upload a file, and wait until it is uploaded.

        In offline mode, ``wandb sync`` uploads the file later. Until then, the file must stay at its path.
        """
        opened = self._opened()
        with translated():
            made = contents.log_artifact(opened.run, artifact, file, self._target.memlog_run)
            if not opened.run.offline and not opened.run.disabled:
                made.wait(timeout=ARTIFACT_TIMEOUT)

    def close(self, status: Status | None, ended_us: int | None = None) -> None:  # noqa: ARG002 - W&B knows no other end than now
        """Finish the run. This uploads the remaining data."""
        opened, self._run = self._run, None
        if opened is not None:
            self._broken = True  # until `finish` succeeds
            with translated():
                opened.finish(0 if status is None else _EXIT_CODES[status])
            self._broken = False
        if self._broken:
            raise unavailable("not everything was uploaded as the run finished")

    def _opened(self) -> _OpenRun:
        if self._broken:
            raise unavailable("not everything was uploaded as the run finished")
        if self._run is None:
            if self._target.joined is not None:
                raise TrackerRejectedError(
                    "only the trainer's process can write to your W&B run: `memlog sync` delivers to a run "
                    "of memlog's own"
                )
            with translated():
                self._run = _OpenRun(self._target, self._settings)
        return self._run

    def _is_storable(self, point: Point) -> bool:
        if not contents.is_storable(point):
            self._diagnostics.drop(
                "not_finite", f"{point.name} is not a finite number: not sent to W&B"
            )
            return False
        return True


class _OpenRun:
    _open = 0

    def __init__(self, target: Target, settings: wandb.Settings) -> None:
        try:
            self.run = _opened_run(target, settings)
        except Exception:
            # Otherwise wandb's own process would treat the run's id as in use.
            _OpenRun._teardown(1)
            raise
        self.definitions = contents.Definitions(self.run)
        _OpenRun._open += 1

    def finish(self, exit_code: int) -> None:
        """Upload the remaining data, and finish the run. Raise if wandb gave up uploading rows."""
        _OpenRun._open -= 1
        log = Path(self.run.settings.log_internal)
        try:
            self.run.finish(exit_code=exit_code)
        finally:
            _OpenRun._teardown(exit_code)  # `finish` returns before wandb has flushed its log
        if (gave_up := rows_given_up(log)) is not None:
            raise unavailable(gave_up)

    @classmethod
    def _teardown(cls, exit_code: int) -> None:
        """End wandb's own process if no other run needs it."""
        if cls._open == 0:
            wandb.teardown(exit_code)


def _opened_run(target: Target, settings: wandb.Settings) -> Any:
    beside = _path_beside(target)
    return wandb.init(
        id=_run_id(target),
        entity=beside.entity,
        project=target.project or beside.project,
        name=target.name,
        group=None if target.beside is None else run_path(target.beside.run_id).run_id,
        job_type="memlog",
        # Offline no run can be resumed, and wandb would print a warning.
        resume="allow" if settings.mode in ("online", "shared") else None,
        reinit="create_new",  # several of memlog's runs may be open at once
        settings=_bounded(settings),
    )


def _bounded(settings: wandb.Settings) -> wandb.Settings:
    """Return settings that keep wandb quiet and limit how long it waits.

    Settings that this version of wandb does not have are left out. The user's timeouts for requests and for
    finishing are kept, because the user knows how slow the server is.
    """
    wanted: dict[str, Any] = {
        "console": "off",
        "silent": True,
        "init_timeout": patience(INIT_TIMEOUT),
        "x_graphql_timeout_seconds": patience(
            getattr(settings, "x_graphql_timeout_seconds", None) or INIT_TIMEOUT
        ),
        "finish_timeout": getattr(settings, "finish_timeout", 0) or FINISH_TIMEOUT,
        "finish_timeout_raises": True,
        "disable_git": True,
        "disable_job_creation": True,
        "save_code": False,
        "x_disable_stats": True,  # they would be the helper's statistics, not the trainer's
        "x_save_requirements": False,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _run_id(target: Target) -> str:
    """Return the id of memlog's own run. It depends on ``target`` only, so later processes find the run."""
    return f"memlog-{target.id_with_beside}" if target.opened is None else target.opened.run_id


def _path_beside(target: Target) -> RunPath:
    """Return the entity and project of ``target.beside``, a user's run.

    Each is ``None`` if the run's address does not contain it.
    """
    uri = None if target.beside is None else target.beside.uri
    return run_path(uri) if uri and "runs/" in uri else RunPath(None, None, "")


def _rows(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Group consecutive points into rows.

    A row's points have the same step, evaluation or epoch. A row has each metric at most once.
    """
    row: list[Point] = []
    names: set[str] = set()
    for point in points:
        first = row[0] if row else point
        if (point.axis, point.index) != (first.axis, first.index) or point.name in names:
            yield row
            row, names = [], set()
        row.append(point)
        names.add(point.name)
    if row:
        yield row
