"""Methods by which the sink contract reaches a tracker and checks the data in the tracker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, TypeAlias, get_args

from msgspec.structs import replace

from memlog.events import Alert, Status
from memlog.sink import InProcessRun, Point, Sink, Target, TrackerRun
from memlog.testing.made import BEGUN_US

Row: TypeAlias = tuple[str, int, float]
"""A point as a tracker holds it: the metric's name, the index on its axis, and the value."""
Time: TypeAlias = tuple[str, int, int]
"""A point's time: the metric's name, the index on its axis, and Unix time in whole milliseconds."""
Shown: TypeAlias = Literal["parameters", "alerts", "files", "order", "times", "ends"]
"""Kinds of data that some trackers can't return."""

RUN = "conformance"


class TrackerAccess:
    """Methods that a subclass implements to reach its tracker.

    If `in_process` is false, leave out the methods whose docstring ends with "Needed only if `in_process`."
    """

    in_process = False
    """The backend's ``in_process``. If true, the training process writes to a user's run, and sinks can't.
    The contract then tests `open_in_process`, and needs four more methods."""

    def open_sink(self, target: Target) -> Sink:
        """Return a new sink for ``target``, as the backend's ``open_sink`` does.

        ``target`` names no connection. The subclass chooses one.
        """
        raise NotImplementedError

    def user_run(self) -> TrackerRun:
        """Open a run as a user would, and leave it open."""
        raise NotImplementedError

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """Call the backend's ``open_in_process`` for a run that `user_run` opened, and return the result.

        Needed only if `in_process`.
        """
        raise NotImplementedError

    def user_logs(self, run: TrackerRun, value: float) -> None:
        """Commit one row with this value, as a user would. Needed only if `in_process`."""
        raise NotImplementedError

    def user_values(self, run_id: str) -> Sequence[float]:
        """Return the user's values that the tracker holds, in order. Needed only if `in_process`."""
        raise NotImplementedError

    def user_ends(self, run: TrackerRun) -> None:
        """End a run that `user_run` opened, as a user would. Needed only if `in_process`."""
        raise NotImplementedError

    def down(self) -> AbstractContextManager[object]:
        """Return a context manager during which the tracker can't be reached."""
        raise NotImplementedError

    def process_ends(self) -> None:
        """Make the client forget open runs, as at the start of a new process. The default does nothing."""


class TrackerReading(TrackerAccess):
    """Methods that a subclass implements to read its tracker's data, with the tracker's own client.

    A subclass implements each method that raises `NotImplementedError` in this class or in `TrackerAccess`.
    It may leave out a method that reads data named in ``cannot_show``.
    """

    cannot_show: ClassVar[Mapping[Shown, str]] = {}
    """Kinds of data that the tracker can't return, with the reasons. The contract checks no such data."""

    def stored(self, value: float) -> float:
        """Return the value that the tracker keeps for ``value``.

        Override this method if the tracker keeps fewer digits.
        """
        return value

    def rows(self, run_id: str) -> Sequence[Row]:
        """Return all rows that memlog stored in a run. The rows of one metric are in the tracker's order."""
        raise NotImplementedError

    def times(self, run_id: str) -> Sequence[Time]:
        """Return the time of each of the `rows`."""
        raise NotImplementedError(_remedy("times"))

    def parameters(self, run_id: str) -> Mapping[str, str]:
        """Return a run's parameters by name.

        Remove a prefix that the sink adds to the names, such as ``memlog/``.
        """
        raise NotImplementedError(_remedy("parameters"))

    def alerts(self, run_id: str) -> Sequence[str]:
        """Return the title of each alert that the tracker shows for a run. Keep duplicates."""
        raise NotImplementedError(_remedy("alerts"))

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        """Return the contents of a run's files, by kind and name."""
        raise NotImplementedError(_remedy("files"))

    def status(self, run_id: str) -> Status | None:
        """Return the final status of a run; ``None`` if the run has not ended."""
        raise NotImplementedError

    def ended_ms(self, run_id: str) -> int | None:
        """Return the end of a run, Unix time in whole milliseconds; ``None`` if the run has not ended."""
        raise NotImplementedError(_remedy("ends"))


class TrackerChecks(TrackerReading):
    """Checks of the data in a tracker, which the contract's tests share."""

    def test_what_cannot_be_shown_has_a_reason(self) -> None:
        """Each kind of data in `cannot_show` is a known kind, and has a reason."""
        for what, why in self.cannot_show.items():
            assert what in get_args(Shown)
            assert len(why.split()) >= 3, f"explain why {what} can't be read back"

    def _own(self, memlog_run: str = RUN) -> Sink:
        return self.open_sink(Target(memlog_run, None, begun_us=BEGUN_US))

    def _is_shown(self, what: Shown) -> bool:
        return what not in self.cannot_show

    def _once(self, repeated: bool) -> bool:
        """Return True if the tracker must hold each row at most once.

        If the sink got a row twice (``repeated`` is true) and is not durable, it may store the row twice.
        """
        return not repeated or self._own().durable

    def _holds(
        self,
        run: TrackerRun,
        points: Iterable[Point],
        *,
        repeated: bool = False,
        ordered: bool = True,
    ) -> None:
        """Check that the tracker holds these points and no others, at their times.

        If ``repeated``, the sink got some points more than once. If ``ordered``, the sink got the points in
        this order.
        """
        wanted = [replace(point, value=self.stored(point.value)) for point in points]
        rows = self.rows(run.run_id)
        held = Counter(rows)
        assert sorted(held) == sorted({(p.name, p.index, p.value) for p in wanted})
        if self._once(repeated):
            assert [row for row, count in held.items() if count != 1] == []
        if self._is_shown("times"):
            times = _times_of(wanted)
            assert [time for time in self.times(run.run_id) if time not in times] == []
        if ordered and not repeated and self._is_shown("order"):
            assert _by_metric(rows) == _by_metric((p.name, p.index, p.value) for p in wanted)

    def _holds_facts(self, run: TrackerRun, facts: Mapping[str, str]) -> None:
        """Check that the run has these parameters. The run may have other parameters, too."""
        if self._is_shown("parameters"):
            held = self.parameters(run.run_id)
            assert {name: held.get(name) for name in facts} == dict(facts)

    def _holds_alerts(
        self, run: TrackerRun, alerts: Sequence[Alert], *, repeated: bool = False
    ) -> None:
        """Check that the tracker shows each of these alerts once, and no other alerts."""
        if self._is_shown("alerts"):
            shown = self.alerts(run.run_id)
            titles = [alert.title for alert in alerts]
            once = self._once(repeated)
            assert sorted(shown if once else set(shown)) == sorted(titles)

    def _holds_files(self, run: TrackerRun, files: Mapping[tuple[str, str], bytes]) -> None:
        """Check that the run has these files, byte for byte, and no others."""
        if self._is_shown("files"):
            assert dict(self.files(run.run_id)) == dict(files)

    def _has_ended(self, run: TrackerRun, status: Status, ended_us: int) -> None:
        assert self.status(run.run_id) == status
        if self._is_shown("ends"):
            assert self.ended_ms(run.run_id) == ended_us // 1000


def _times_of(points: Sequence[Point]) -> set[Time]:
    """Return the times under which a tracker may store the points.

    A tracker may store all points of one index under the time of any of these points.
    """
    at_index: dict[tuple[str, int], set[int]] = defaultdict(set)
    for point in points:
        at_index[point.axis, point.index].add(point.time_us // 1000)
    return {
        (point.name, point.index, time)
        for point in points
        for time in at_index[point.axis, point.index]
    }


def _by_metric(rows: Iterable[Row]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, index, value in rows:
        found[name].append((index, value))
    return found


def _remedy(what: Shown) -> str:
    return f"implement this method, or explain in cannot_show[{what!r}] why the tracker can't return it"
