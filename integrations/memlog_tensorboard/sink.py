"""Sink for one folder of event files. The sink runs in a process of memlog's own."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import RunRefusedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.sink import USERS_NUMBER, Point, Resolution, Target, TrackerRun, written
from memlog_tensorboard.backend import MOVED_FILE, OWN_FILE, run_in
from memlog_tensorboard.event_file import EventFile, Scalar
from memlog_tensorboard.purges import file_to_follow

ALERTS = "memlog/alerts"
DESCRIPTION = "memlog/description"
FILES = "memlog/files"
PARAMETERS = "memlog/parameters"
STATUS = "memlog/status"

_LARGEST = float(np.finfo(np.float32).max)
_UNSAFE = re.compile(r"[^\w.\- ]+")
_MAX_NAME = 100


class TensorboardSink:
    """A `memlog.sink.Sink` for TensorBoard. Its methods raise the errors that `Sink` names.

    A run is a folder. memlog writes one file of its own there, and does not change the user's files.

    Args:
        target: The run to write to. The id of a user's run is the path of the run's folder.

    Attributes:
        dropped: Number of points left out so far, by reason. The only reason is ``too_large``: the value is
            beyond the range of TensorBoard's 32-bit floats.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000
    has_files = False

    def __init__(self, target: Target) -> None:
        self._diagnostics = Diagnostics()
        self.dropped: Mapping[str, int] = self._diagnostics.dropped
        self._target = target
        self._known = target.joined or target.opened
        self._root = Path(target.connection.uri or "runs").absolute()
        self._folder = Path(self._known.run_id) if self._known else self._root / _own_run(target)
        run = _UNSAFE.sub("_", target.memlog_run)
        begun = (target.begun_us or 0) // 1_000_000
        moved = next(self._folder.glob(f"*tfevents*{MOVED_FILE.format(run=run)}"), None)
        self._moved_name = MOVED_FILE.format(run=run)
        self._file = EventFile(moved or self._folder / OWN_FILE.format(begun=begun, run=run))

    def probe(self) -> None:
        """Check that the folder exists or can be made."""
        if self._folder.is_dir():
            return
        # If the parent is missing, too, the folder may be on a disk that is not mounted.
        parent = self._root.parent if self._known is None else self._folder.parent
        if not parent.is_dir():
            raise TrackerUnavailableError(
                f"there is no folder {parent}: mount its disk, or create it again"
            )
        if self._known is not None:
            raise RunRefusedError(f"the TensorBoard folder {self._folder} is deleted")

    def open(self) -> TrackerRun:
        """Find the user's folder, or make memlog's own."""
        self.probe()
        with written("TensorBoard", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        return run_in(self._folder)

    def log_points(self, points: Sequence[Point]) -> None:
        """Store points, each with the time of its event. One call takes at most `max_points` points."""
        numbers = [point for point in points if point.name == USERS_NUMBER]
        self._append(Scalar(point.index, point.time_us / 1e6, _scalar(point)) for point in numbers)
        self._append(
            Scalar(
                self._file.number_of(point.index) if point.axis == "step" else point.index,
                point.time_us / 1e6,
                _scalar(point),
            )
            for point in points
            if point.name != USERS_NUMBER and self._is_storable(point)
        )

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store new parameters, and parameters with a new value, as one text that shows a table."""
        self._append([])
        known = {pair for text in self._file.texts.get(PARAMETERS, ()) for pair in _pairs(text)}
        rows = [(_bytes(name), _bytes(value)) for name, value in sorted(parameters.items())]
        new = [row for row in rows if row not in known]
        if new:
            # TensorBoard shows only one text for a tag and a step, so each table gets another step.
            self._append([Scalar(len(known), self._begun, _text(PARAMETERS, new))])

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Store the new alerts as texts, at their steps. Each rule has its own tag."""
        self._append([])  # it reads the file
        self._append(
            Scalar(
                self._file.number_of(alert.step or 0),
                alert.time_us / 1e6,
                _text(f"{ALERTS}/{alert.rule}", _bytes(_described(alert))),
            )
            for alert in alerts[first_new:]
        )

    def log_artifact(self, artifact: Artifact, file: Path) -> None:  # noqa: ARG002 - TensorBoard takes no files
        """Store a text that names the file's folder. TensorBoard stores no files."""
        text = (
            f"`{artifact.name}` ({artifact.kind}, {artifact.size:,} bytes) is in the folder of memlog's run "
            f"{self._target.memlog_run}, from which `memlog pull` copies it."
        )
        value = _text(f"{FILES}/{artifact.name}", _bytes(text))
        self._append([Scalar(0, artifact.time_us / 1e6, value)])

    def wants_description(self) -> bool:
        """Return True if memlog opened the run and the run has no description yet."""
        return self._target.joined is None and DESCRIPTION not in self._file.texts

    def log_description(self, text: str) -> None:
        """Store the text about the run."""
        self._append([Scalar(0, self._begun, _text(DESCRIPTION, _bytes(text)))])

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Store the final status of memlog's own run as a text. TensorBoard itself has no status of a run."""
        if self._target.joined is None and status is not None:
            ended = time.time() if ended_us is None else ended_us / 1e6
            self._append([Scalar(0, ended, _text(STATUS, _bytes(status)))])

        if self._target.joined is not None:
            self._come_after_purges()

    def _come_after_purges(self) -> None:
        """Rename memlog's file, so that the user's ``purge_step`` does not hide memlog's values."""
        with written("TensorBoard", self._folder):
            if self._file.path.exists() and not self._file.path.name.endswith(self._moved_name):
                last = file_to_follow(self._folder)
                if last is not None:
                    self._file.move(last.with_name(last.name + self._moved_name))

    @property
    def _begun(self) -> float:
        """Start of the run, Unix time in seconds; the current time if the start is unknown."""
        begun = self._target.begun_us
        return time.time() if begun is None else begun / 1e6

    def _append(self, entries: Iterable[Scalar]) -> None:
        self.probe()
        with written("TensorBoard", self._folder):
            self._file.append(entries)

    def _is_storable(self, point: Point) -> bool:
        if math.isfinite(point.value) and abs(point.value) > _LARGEST:
            self._diagnostics.drop(
                "too_large", f"{point.name} has a value beyond 32 bits: not sent to TensorBoard"
            )
            return False
        return True


def _own_run(target: Target) -> Path:
    """Return the folder of memlog's own run, relative to the folder of all runs.

    The result depends on ``target`` only, so a later process finds the run again.
    """
    run = f"{(target.name or 'memlog')[:_MAX_NAME]}-{target.id_with_beside}"
    parts = [target.project, run] if target.project else [run]
    return Path(*(_UNSAFE.sub("_", part).strip(". ") or "_" for part in parts))


def _scalar(point: Point) -> Any:
    # TensorBoard's default server does not show values that are stored as a 64-bit tensor.
    return Summary.Value(tag=_bytes(point.name).decode(), simple_value=point.value)


def _text(tag: str, content: object) -> Any:
    (value,) = text_pb(_bytes(tag).decode(), np.array(content, dtype=object)).value
    return value


def _bytes(text: str) -> bytes:
    # A name from the user can contain a lone surrogate, which strict UTF-8 can't encode.
    return str(text).encode("utf-8", "backslashreplace")


def _pairs(text: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(text[::2], text[1::2], strict=True)


def _described(alert: Alert) -> str:
    where = "" if alert.where is None else f" ({alert.where})"
    return f"**{alert.level}: {alert.title}**{where}\n\n{alert.text or alert.rule}"
