"""Buffer of memlog's values for the rows of a user's run, and a CSV file of all points.

Most users log the row of step k after the optimizer's step. That row gets all values published since the
previous row. The values of each metric are folded (`memlog.sink.Fold`): the row gets the largest value of a
peak, and the newest value of most other metrics. Other users log before the step. Their row of step k is
already open when the event of step k is published. The row gets the event's values before it is closed.
"""

from __future__ import annotations

import csv
import io
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import replacing
from memlog.events import Artifact, Batch, Event, now_us
from memlog.journal import Header, RunDirectory
from memlog.journal.artifacts import safe_name
from memlog.metrics import Plan, axis_and_index, replaces, sent_values
from memlog.sink import Axis, Point

_MAX_RECEIVED = 1000
"""When this number of events is stored, `receive` itself folds them, on the publishing thread.

Usually they are folded earlier: by the writer's thread, or by the user's thread at the next row.
"""


class UsersRows:
    """A `memlog.sink.Rows`: the values that wait for the user's next row, and the values of the open row.

    Attributes:
        folded: Number of steps, evaluations and epochs that have no complete row of their own. For example,
            a step shares a row with a later step, or a value of the step came after the row was closed.
        delivered: Number of points put into rows, counted before folding.
        number_first: Function called with the user's number of the first row, and the last completed step
            before it. It returns the amount by which the run's steps rise, for which events that come later
            are changed already. ``None``: it was called.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.folded = 0
        self.delivered = 0
        self.number_first: Callable[[int | None, int | None], int] | None = None
        self._diagnostics = diagnostics
        self._generation = processes.generation
        self._lock = threading.RLock()  # a signal handler of the user's may log
        self._received: deque[Event] = deque()
        self._waiting = _RowValues()
        # Values that belong to the open row, but came after the user had logged to the row.
        self._late = _RowValues()
        self._held = _RowValues()
        self._closed: dict[Axis, int] = {}
        self._points = 0
        self._number: int | None = None
        self._number_before: int | None = None
        self._logs_first: bool | None = None

    @property
    def has_waiting(self) -> bool:
        """True if there are values that no row has yet."""
        return bool(self._waiting.points or self._late.points or self._received)

    def open(self, number: int | None) -> None:
        """Begin to keep values for a run that the user has opened.

        ``number`` is the number that the user gave the open row; ``None`` if they gave none.
        """
        with self._lock:
            self._held, self._number, self._logs_first = _RowValues(), number, None

    def receive(self, event: Event) -> None:
        """Store an event for `fold_received`. Called on the trainer's thread when the event is published."""
        self._received.append(event)
        if len(self._received) >= _MAX_RECEIVED:
            self.fold_received()

    def fold_received(self) -> None:
        """Add the values of all received events to the values for the rows."""
        with self._lock:
            while self._received:
                event = self._received.popleft()
                if isinstance(event, Batch) and self._logs_first is None:
                    self._logs_first = self._number is not None and event.step == self._number
                self.add(event)

    def add(self, event: Event) -> None:
        """Fold one event's values into the values for the open row or for the next row."""
        on_axis = axis_and_index(event)
        if on_axis is None:
            return
        axis, index = on_axis
        with self._lock:
            reached, closed = self._held.newest.get(axis, -1), self._closed.get(axis, -1)
            # The user logs each row before its step. The helper's samples of earlier steps can come after the
            # row was opened. These samples join the open row, so that they do not get a row of their own.
            if self._logs_first and axis == "step" and self._number is not None:
                reached = max(reached, self._number)
            into = self._late if index <= reached else self._waiting
            is_shared = closed < into.newest.get(axis, index) < index
            for name, value, fold in sent_values(event):
                if value is None:
                    continue
                self._points += 1
                if fold == "last" and index < closed:
                    is_shared = True  # in a later row, the value would look like a later step's
                else:
                    into.put(Point(name, value, axis, max(index, closed), event.time_us, fold))
            self.folded += is_shared

    def enter(self, number: int | None) -> tuple[Sequence[Point], Sequence[Point]]:
        if processes.generation != self._generation:
            return (), ()
        with self._lock:
            self.fold_received()
            if self.number_first is not None:
                self._number_steps(self.number_first, number)
            before: Sequence[Point] = ()
            self._number_before = self._number
            if number is not None and number != self._number:
                before = self._take(self._late)
                self._held, self._number = _RowValues(), number
            else:
                self._waiting.put_all(self._late)
            self._late, waiting, self._waiting = _RowValues(), self._waiting, _RowValues()
            return before, self._take(waiting)

    def _number_steps(
        self, number_first: Callable[[int | None, int | None], int], number: int | None
    ) -> None:
        """Call `number_first` with the user's number of the row that belongs to the last completed step."""
        self.number_first = None
        waiting, late = self._waiting, self._late
        step = max(waiting.newest.get("step", -1), late.newest.get("step", -1))
        if self._number is None or number != self._number + 1 + max(step, 0):
            waiting.raise_steps(number_first(number, None if step < 0 else step))
            return
        # The user logs a row and then steps. The first row was logged before memlog found the run.
        rise = number_first(self._number, None)
        waiting.raise_steps(rise)
        if rise and step <= 0:
            late.put_all(waiting)
            self._waiting, self._logs_first = _RowValues(), True

    def leave(self) -> None:
        with self._lock:
            self._held, self._number = _RowValues(), None

    def give_back(self, points: Sequence[Point]) -> None:
        with self._lock:
            newer, self._waiting, self._held = self._waiting, _RowValues(), _RowValues()
            for point in points:
                self._waiting.put(point)
            self._waiting.put_all(newer)
            # The new row was not opened, so the previous row is still open. It must not get the late values.
            self._waiting.put_all(self._late)
            self._late, self._number = _RowValues(), self._number_before

    def failed(self, error: Exception) -> None:
        self._diagnostics.fault("adding to a row of the user's", error)

    def take_for_open_row(self) -> Sequence[Point]:
        """Take the values for the open row.

        If the user numbers rows, leave out the values of steps after the open row's step.
        """
        with self._lock:
            self.fold_received()
            if self._number is None:
                self._late.put_all(self._waiting)
                self._waiting = _RowValues()
            late, self._late = self._late, _RowValues()
            return self._take(late)

    def take_for_new_row(self) -> Sequence[Point]:
        """Take the values that wait for the next row. memlog adds this row itself.

        Call it only if the user will log no more rows.
        """
        with self._lock:
            waiting, self._waiting, self._held = self._waiting, _RowValues(), _RowValues()
            return self._take(waiting)

    def _take(self, taken: _RowValues) -> Sequence[Point]:
        """Fold new values into the values that the row already has. Return the results as points of the row.

        In the tracker, these points replace the row's points of the same names.
        """
        held = self._held
        stale = [
            point.name
            for point in taken.points.values()
            if point.fold == "last"
            and point.index <= self._closed.get(point.axis, -1) < taken.newest[point.axis]
        ]  # values of steps that already have a row; here they would look like values of a later step
        for name in stale:
            del taken.points[name]
        self.folded += bool(stale)
        for axis, index in taken.newest.items():
            self.folded += held.newest.get(axis, index) < index
        held.put_all(taken)
        self._closed.update(held.newest)
        self.delivered, self._points = self.delivered + self._points, 0
        return [_at(held.points[name], held.newest) for name in taken.points]


class _RowValues:
    """Points for one row. Several points of one metric are folded into one point."""

    def __init__(self) -> None:
        self.points: dict[str, Point] = {}
        self.newest: dict[Axis, int] = {}

    def put(self, point: Point) -> None:
        axis, index, held = point.axis, point.index, self.points.get(point.name)
        self.newest[axis] = max(index, self.newest.get(axis, index))
        if held is None or (
            index >= held.index
            if point.fold == "last"
            else replaces(point.fold, point.value, held.value)
        ):
            self.points[point.name] = point

    def raise_steps(self, rise: int) -> None:
        """Add ``rise`` to the number of each step."""
        if rise and "step" in self.newest:
            self.newest["step"] += rise
            self.points = {
                name: msgspec.structs.replace(point, index=point.index + rise)
                if point.axis == "step"
                else point
                for name, point in self.points.items()
            }

    def put_all(self, other: _RowValues) -> None:
        for point in other.points.values():
            self.put(point)


def _at(point: Point, newest: Mapping[Axis, int]) -> Point:
    """Return ``point`` with the newest index of its axis. A row has only one index on each axis."""
    index = newest[point.axis]
    return point if point.index == index else msgspec.structs.replace(point, index=index)


SERIES_KIND = "series"
_COLUMNS = ("axis", "index", "time_us", "name", "value")


def write_series(
    run: RunDirectory, name: str, belongs: Callable[[Header], bool], offset: int = 0
) -> Artifact:
    """Write every point of the chosen segments to a CSV file in the run's ``artifacts`` folder.

    The file's columns are axis, index, time_us (Unix time in microseconds), name and value. A segment is
    chosen if ``belongs`` returns True for its header. ``offset`` is `memlog.journal.Binding.offset` of the
    tracker's run. Steps have the same numbers as in that run.

    Raises:
        OSError: the file can't be written.
    """
    safe = safe_name(name)
    path = f"{run.artifacts.name}/{safe}"
    with replacing(run.path, path) as target:
        file = io.TextIOWrapper(target, encoding="utf-8", newline="", write_through=True)
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        for journal in run.files():
            plan: Plan[Any] = Plan("full", offset=offset)
            header, chosen = None, False
            for entry in journal.read():
                if entry.header is not header:
                    header, before = entry.header, chosen
                    chosen = belongs(header)
                    if chosen != before:
                        _write(rows, plan.flush())
                if chosen:
                    _write(rows, plan.feed(entry.event, entry.start))
            _write(rows, plan.flush())
        file.flush()
        file.detach()
        size = target.tell()
    return Artifact(now_us(), safe, SERIES_KIND, path, size)


def _write(rows: Any, points: list[Point]) -> None:
    rows.writerows((p.axis, p.index, p.time_us, p.name, repr(p.value)) for p in points)
