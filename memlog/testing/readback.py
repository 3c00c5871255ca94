"""How the contract of sinks reaches a tracker, and looks at what it holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, TypeAlias, get_args

from memlog.events import Alert, Status
from memlog.sink import InProcessRun, Point, Sink, Target, TrackerRun
from memlog.testing.made import BEGUN_US

Row: TypeAlias = tuple[str, int, float]
"""What a tracker holds of a point: the metric's name, where on its axis, and the value."""
Time: TypeAlias = tuple[str, int, int]
"""When a point was: the metric's name, where on its axis, and Unix time in whole milliseconds."""
Shown: TypeAlias = Literal["parameters", "alerts", "files", "order", "times", "ends"]
"""What some tracker may be unable to give back."""

RUN = "conformance"


class TrackerReading:
    """What a subclass says of its tracker: how to reach it, and what its own client then reads of it.

    Every method is to be implemented, except the in-process ones if there are none, and those of which
    ``cannot_show`` says why not.
    """

    in_process = False
    """As the backend's ``in_process``: a user's run is no sink's to join, but is written from the trainer's
    own process. Its writing in process is tested in place of joining, for which four more methods are
    needed."""
    cannot_show: ClassVar[Mapping[Shown, str]] = {}
    """What the tracker can give nobody back, each with the reason: that alone is not looked at."""

    # How it is reached

    def open_sink(self, target: Target) -> Sink:
        """A new sink for ``target``, as its backend's ``open_sink`` makes it; the connection is yours."""
        raise NotImplementedError

    def user_run(self) -> TrackerRun:
        """Opens a run as a user would, and leaves it open."""
        raise NotImplementedError

    def open_in_process(self, run: TrackerRun) -> InProcessRun:
        """A way to write to a run of `user_run`, made by the backend's ``open_in_process``."""
        raise NotImplementedError

    def user_logs(self, run: TrackerRun, value: float) -> None:
        """Commits one row of the user's with this value, as a user would; if `in_process`."""
        raise NotImplementedError

    def user_values(self, run_id: str) -> Sequence[float]:
        """The user's own values that the tracker holds, in their order; if `in_process`."""
        raise NotImplementedError

    def user_ends(self, run: TrackerRun) -> None:
        """Ends a run of `user_run`, as a user would; if `in_process`."""
        raise NotImplementedError

    def down(self) -> AbstractContextManager[object]:
        """While it is entered, the tracker can't be reached."""
        raise NotImplementedError

    def process_ends(self) -> None:
        """Where a client keeps account of the runs its process has open: as if that process had ended."""

    # What it holds, read by the tracker's own client

    def rows(self, run_id: str) -> Sequence[Row]:
        """Every row of memlog's for a run; those of one metric in the order that the tracker shows."""
        raise NotImplementedError

    def times(self, run_id: str) -> Sequence[Time]:
        """When each of the `rows` was."""
        raise NotImplementedError(_remedy("times"))

    def parameters(self, run_id: str) -> Mapping[str, str]:
        """The parameters of a run, by memlog's own names as far as the tracker takes them."""
        raise NotImplementedError(_remedy("parameters"))

    def alerts(self, run_id: str) -> Sequence[str]:
        """The titles of the alerts that are shown of a run, one as often as it is."""
        raise NotImplementedError(_remedy("alerts"))

    def files(self, run_id: str) -> Mapping[tuple[str, str], bytes]:
        """What the files of a run hold, by kind and name."""
        raise NotImplementedError(_remedy("files"))

    def status(self, run_id: str) -> Status | None:
        """How a run ended; ``None``: it has not."""
        raise NotImplementedError

    def ended_ms(self, run_id: str) -> int | None:
        """When a run ended, Unix time in whole milliseconds."""
        raise NotImplementedError(_remedy("ends"))

    def test_what_cannot_be_shown_has_a_reason(self) -> None:
        """It is left out of the contract on purpose, and not by a slip."""
        for what, why in self.cannot_show.items():
            assert what in get_args(Shown)
            assert len(why.split()) >= 3, f"say why nobody can read {what} back"

    # What the contract's tests look at

    def _own(self, memlog_run: str = RUN) -> Sink:
        return self.open_sink(Target(memlog_run, None, begun_us=BEGUN_US))

    def _is_shown(self, what: Shown) -> bool:
        return what not in self.cannot_show

    def _once(self, repeated: bool) -> bool:
        """Whether nothing may stand there twice: what is not durable may repeat, but only if it had to."""
        return not repeated or self._own().durable

    def _holds(
        self,
        run: TrackerRun,
        points: Iterable[Point],
        *,
        repeated: bool = False,
        ordered: bool = True,
    ) -> None:
        """The tracker holds these points and no others, at their times.

        Args:
            run: Whose they are.
            points: What was handed over.
            repeated: Some of them were handed over more than once.
            ordered: They were handed over in this order.
        """
        wanted, rows = list(points), self.rows(run.run_id)
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
        """The run has these parameters; it may have others."""
        if self._is_shown("parameters"):
            held = self.parameters(run.run_id)
            assert {name: held.get(name) for name in facts} == dict(facts)

    def _holds_alerts(
        self, run: TrackerRun, alerts: Sequence[Alert], *, repeated: bool = False
    ) -> None:
        """These alerts are shown and no others, each of them once."""
        if self._is_shown("alerts"):
            shown = self.alerts(run.run_id)
            titles = [alert.title for alert in alerts]
            once = self._once(repeated)
            assert sorted(shown if once else set(shown)) == sorted(titles)

    def _holds_files(self, run: TrackerRun, files: Mapping[tuple[str, str], bytes]) -> None:
        """The run has these files, byte for byte, and no others."""
        if self._is_shown("files"):
            assert dict(self.files(run.run_id)) == dict(files)

    def _has_ended(self, run: TrackerRun, status: Status, ended_us: int) -> None:
        """So, and then."""
        assert self.status(run.run_id) == status
        if self._is_shown("ends"):
            assert self.ended_ms(run.run_id) == ended_us // 1000


def _times_of(points: Sequence[Point]) -> set[Time]:
    """When points may be shown: a tracker may hold those of one place as a row, which has one time."""
    at_place: dict[tuple[str, int], set[int]] = defaultdict(set)
    for point in points:
        at_place[point.axis, point.index].add(point.time_us // 1000)
    return {
        (point.name, point.index, time)
        for point in points
        for time in at_place[point.axis, point.index]
    }


def _by_metric(rows: Iterable[Row]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, index, value in rows:
        found[name].append((index, value))
    return found


def _remedy(what: Shown) -> str:
    return f"read it back, or say in cannot_show[{what!r}] why nobody can"
