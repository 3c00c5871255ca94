"""Sink for one MLflow run. The sink runs in a process of memlog's own."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunData
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import bare_address
from memlog.errors import RunRefusedError, TrackerRejectedError
from memlog.events import Alert, Artifact, Status
from memlog.sink import CLOSING_PARAMETERS, Point, Resolution, Target, TrackerRun
from memlog_mlflow import runs
from memlog_mlflow.alerts import ALERTS_FILE, alert_table, alert_tags
from memlog_mlflow.databases import make_if_missing
from memlog_mlflow.errors import translated
from memlog_mlflow.keys import ARTIFACTS, safe_key
from memlog_mlflow.probe import probe
from memlog_mlflow.replays import StoredRows
from memlog_mlflow.uris import is_folder, link_to

MAX_VALUE = 6000
"""Maximum number of characters of a parameter's value. A longer value is cut."""

_OWN_TABLE = "| memory | by memlog |"
"""Line that only memlog's own descriptions contain (`memlog.reports.description`)."""

NOTE_TAG = "memlog.description"
"""Tag of a user's run that memlog has described. Its value is a digest of memlog's text, so that memlog
recognizes the text."""

_STATUSES: Mapping[Status, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}


_WORSE: Mapping[str, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 2}
"""Statuses of a run that has ended, ordered. A status is only replaced by one with a lower number."""


class MlflowSink:
    """A `memlog.sink.Sink` for MLflow. Its methods raise the errors that `Sink` names.

    The sink has its own client and names the run by its id, because MLflow's active run exists only in the
    training process.

    Args:
        target: The run to write to.

    Attributes:
        dropped: Number of points and parameters left out so far, by reason: ``not_finite`` (an infinity,
            which MLflow would store as 1.8e308), ``parameter_conflict`` (the run has another
            value) and ``parameter_rejected`` (MLflow refuses the parameter).
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000

    def __init__(self, target: Target) -> None:
        self._diagnostics = Diagnostics()
        self.dropped: Mapping[str, int] = self._diagnostics.dropped
        self._target = target
        self._uri = _uri_of(target)
        self._open: _OpenRun | None = None
        _quieten()

    def probe(self) -> None:
        """Check whether MLflow can be reached."""
        probe(self._uri)

    def open(self) -> TrackerRun:
        """Join the user's run, or find or create memlog's own."""
        info = self._opened().info
        link = link_to(self._uri, info.experiment_id, info.run_id)
        return TrackerRun(info.run_id, self._uri, info.run_name, link)

    def log_points(self, points: Sequence[Point]) -> None:
        """Store points, each with the time of its event. A point that is stored already is not stored again.

        Args:
            points: At most `max_points` points.
        """
        metrics = [
            Metric(safe_key(point.name), point.value, point.time_us // 1000, point.index)
            for point in points
            if self._is_storable(point)
        ]
        if metrics:
            self._opened().log(metrics)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store parameters under ``memlog/``. A parameter that the run already has is not changed."""
        wanted = {
            safe_key(f"memlog/{name}"): str(value)[:MAX_VALUE] for name, value in parameters.items()
        }
        known = self._opened().data().params
        closing = {safe_key(f"memlog/{name}") for name in CLOSING_PARAMETERS}
        for key in (wanted.keys() & known.keys()) - closing:
            if wanted[key] != known[key]:
                self._diagnostics.drop(
                    "parameter_conflict",
                    f"the MLflow run has {key!r} from an earlier session, with another value; "
                    "MLflow never changes a parameter, so it keeps that value",
                )
        self._log_new({key: wanted[key] for key in wanted.keys() - known.keys()})

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Write all alerts to ``memlog/alerts.json``, and the last alert to tags.

        MLflow has no alerts of its own (its webhooks are for other things).
        """
        if alerts[first_new:]:
            self._opened().show_alerts(alerts)

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Store a file as ``memlog/artifacts/<kind>/<name>``. The run's page can preview it."""
        self._opened().store(artifact, file)

    def wants_description(self) -> bool:
        """Return True if the run's description is missing or outdated, and the user has not written it.

        A description of memlog's own run is outdated if memlog stored it before the training was restarted.
        In a user's run, memlog replaces only a text that it has stored itself and that nobody has changed.
        """
        tags = self._opened().data().tags
        note = tags.get(MLFLOW_RUN_NOTE, "")
        if self._target.joined is not None:
            return not note.strip() or tags.get(NOTE_TAG) == _digest(note)
        return not note or (self._target.continues is not None and _OWN_TABLE in note)

    def log_description(self, text: str) -> None:
        """Store the text that MLflow shows on the run's first page."""
        if self._target.joined is not None:
            self._opened().set_tag(NOTE_TAG, _digest(text))
        self._opened().set_tag(MLFLOW_RUN_NOTE, text)

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """End memlog's own run. A joined run is not ended."""
        if self._open is None:
            return
        if self._target.joined is None and status is not None:
            self._open.end(_STATUSES[status], ended_us)
        self._open = None

    def _opened(self) -> _OpenRun:
        if self._open is None:
            with translated():
                self._open = _OpenRun(self._uri, self._target)
        return self._open

    def _is_storable(self, point: Point) -> bool:
        if math.isinf(point.value):
            self._diagnostics.drop("not_finite", f"{point.name} is infinite: not sent to MLflow")
            return False
        return True

    def _log_new(self, parameters: Mapping[str, str]) -> None:
        """Store parameters that the run does not have. If MLflow refuses the batch, store them one by one."""
        try:
            self._opened().log_parameters(parameters)
        except RunRefusedError:
            raise
        except TrackerRejectedError as error:
            if len(parameters) == 1:
                self._diagnostics.drop(
                    "parameter_rejected", f"parameter {next(iter(parameters))!r}: {error}"
                )
                return
            for key, value in parameters.items():
                self._log_new({key: value})


class _OpenRun:
    def __init__(self, uri: str, target: Target) -> None:
        with _only_warnings():
            make_if_missing(uri)
            self._client = MlflowClient(tracking_uri=uri)
        if target.joined is None:
            self.info = runs.find_or_create(self._client, target).info
            if target.continues is not None and self.info.end_time is not None:
                # The attempt before the restart has ended the run.
                self._client.update_run(self.info.run_id, status="RUNNING")
        else:
            self.info = runs.join(self._client, target.joined.run_id, target.memlog_run).info
        self.run_id: str = self.info.run_id
        self._doubles = is_folder(uri)
        self._stored = StoredRows(self._client, self.run_id)

    def log(self, metrics: Sequence[Metric]) -> None:
        plain = [metric for metric in metrics if not self._would_double(metric)]
        with self._asked():
            missing = self._stored.missing([m for m in metrics if self._would_double(m)])
            try:
                self._client.log_batch(self.run_id, metrics=plain + missing, synchronous=True)
            except BaseException:
                self._stored.forget()
                raise
            self._stored.add(missing)

    def data(self) -> RunData:
        with self._asked():
            return self._client.get_run(self.run_id).data

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        params = [Param(key, value) for key, value in sorted(parameters.items())]
        with self._asked():
            self._client.log_batch(self.run_id, params=params, synchronous=True)

    def show_alerts(self, alerts: Sequence[Alert]) -> None:
        with self._asked():
            self._client.log_dict(self.run_id, alert_table(alerts), ALERTS_FILE)
            for key, value in alert_tags(alerts).items():
                self._client.set_tag(self.run_id, key, value, synchronous=True)

    def set_tag(self, key: str, value: str) -> None:
        with self._asked():
            self._client.set_tag(self.run_id, key, value, synchronous=True)

    def store(self, artifact: Artifact, file: Path) -> None:
        with self._asked():
            self._client.log_artifact(self.run_id, str(file), f"{ARTIFACTS}/{artifact.kind}")

    def end(self, status: str, ended_us: int | None) -> None:
        with self._asked():
            info = self._client.get_run(self.run_id).info
            # Ending the run again would change its end time. If memlog's knowledge of the end was lost, for
            # example on a full disk, memlog takes the run as killed. The tracker then knows better.
            if info.end_time is None or _WORSE.get(info.status, 3) > _WORSE[status]:
                ended_ms = None if ended_us is None else ended_us // 1000
                self._client.set_terminated(self.run_id, status=status, end_time=ended_ms)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Translate a request's errors. If MLflow refuses an unusable run, raise `RunRefusedError`."""
        try:
            with translated():
                yield
        except TrackerRejectedError:
            with translated():
                runs.usable(self._client, self.run_id)
            raise

    def _would_double(self, metric: Metric) -> bool:
        """Return True if memlog must send ``metric`` only once.

        MLflow's file store would store a repeated metric twice. If a database already has a NaN, older
        versions of MLflow refuse a batch that repeats this NaN.
        """
        return self._doubles or math.isnan(metric.value)


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _uri_of(target: Target) -> str:
    """Return the URI of the store that contains the target's run.

    For a new run, return the current URI. For an existing run, memlog's journal has the URI without
    credentials. If both URIs name the same store, return the current URI, because the client needs the
    credentials. If the URIs name different stores, return the URI from the journal.
    """
    current: str = target.connection.uri or mlflow.get_tracking_uri()
    known = target.joined or target.opened
    if known is None or known.uri is None or bare_address(current) == known.uri:
        return current
    return known.uri


def _quieten() -> None:
    """Keep MLflow's loggers from repeating memlog's messages. For memlog's own processes only."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # This logger prints a traceback with every row of a batch. MLflow raises the same error.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Keep MLflow from logging each table of a new database.

    Setting the loggers' levels would not suffice: older versions set them again, and some of the loggers are
    not named after a package.
    """
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
