"""Contract tests of sinks, and of an uploader that delivers a whole run to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast, get_args

from msgspec.structs import replace

from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Status
from memlog.journal import RunDirectory
from memlog.sink import Point, Sink, Target, TrackerRun
from memlog.testing.made import (
    BEGUN_US,
    CONTENT,
    ENDED_US,
    FACTS,
    Fault,
    InterruptedSink,
    OddError,
    alert,
    file_in,
    odd,
    odd_points,
    plan_of,
    points,
    points_everywhere,
    recorded,
    refused,
    unavailable,
)
from memlog.testing.readback import RUN, TrackerChecks

_AT_MOST = 200
"""Maximum number of calls in one delivery. If a delivery takes more calls, the test fails."""
_SOURCE = ("file", "source")


class DeliveryContract(TrackerChecks):
    """Tests that a recorded run arrives completely and without duplicates, whichever call fails."""

    def test_a_whole_run_arrives_once(self, tmp_path: Path) -> None:
        """If no call fails, nothing is stored twice, whether the sink is durable or not."""
        run = recorded(tmp_path)
        tracked = self._deliver(run, Fault(-1))
        self._has_all_of(run, tracked, Fault(-1), repeated=False)

    def test_a_failure_at_any_call_loses_nothing_and_doubles_nothing(self, tmp_path: Path) -> None:
        """Each call in turn fails, before or after it is executed. Another uploader then continues."""
        for answered in (False, True):
            folder = tmp_path / str(answered)
            self._check_each_failure(folder, partial(Fault, answered=answered, error=unavailable))

    def test_a_refusal_of_any_call_costs_that_alone(self, tmp_path: Path) -> None:
        """Refused data is counted, and everything else arrives."""
        self._check_each_failure(tmp_path, partial(Fault, error=refused))

    def test_an_odd_error_of_any_call_loses_nothing(self, tmp_path: Path) -> None:
        """An unexpected exception of a client counts as an unreachable tracker."""
        self._check_each_failure(tmp_path, partial(Fault, answered=True, error=odd))

    def _check_each_failure(self, root: Path, fault_at: Callable[[int], Fault]) -> None:
        """Make one call of an uploader fail, and check that another uploader completes the delivery.

        Repeat this for each call.
        """
        for at in range(_AT_MOST):
            fault = fault_at(at)
            run = recorded(root / str(at))
            with suppress(DeliveryError, OddError):
                self._deliver(run, fault)
            self.process_ends()
            tracked = self._deliver(run, Fault(-1), lost=_lost_to(fault))
            self._has_all_of(run, tracked, fault, repeated=fault.failed is not None)
            if fault.failed is None:
                return
        raise AssertionError(f"delivering takes more than {_AT_MOST} calls")

    def _has_all_of(
        self, run: RunDirectory, tracked: TrackerRun, fault: Fault, *, repeated: bool
    ) -> None:
        """Check that a recorded run has arrived, except the data that the tracker refused."""
        lost = _lost_to(fault)
        alone = fault.points if fault.refuses and len(fault.points) == 1 else ()
        wanted = [point for point in plan_of(run) if point not in alone]
        self._holds(tracked, wanted, repeated=repeated, ordered=False)
        if not (fault.failed == "log_parameters" and fault.refuses):
            self._holds_facts(tracked, FACTS)
        self._holds_alerts(
            tracked, [] if "alerts_rejected" in lost else [alert(3)], repeated=repeated
        )
        self._holds_files(tracked, {} if "artifact_rejected" in lost else {_SOURCE: CONTENT})
        self._has_ended(tracked, "failed", ENDED_US)

    def _deliver(
        self, run: RunDirectory, fault: Fault, lost: Counter[str] | None = None
    ) -> TrackerRun:
        def open_sink(target: Target) -> Sink:
            return cast("Sink", InterruptedSink(self.open_sink(target), fault))

        uploader = Uploader(run, "conformance", open_sink, begun_us=BEGUN_US, may_open_own=True)
        uploader.deliver(complete=True)
        uploader.close()
        if uploader.refused is not None:
            raise TrackerRejectedError(uploader.refused)
        assert uploader.state.own_run is not None
        assert uploader.state.dropped == (_lost_to(fault) if lost is None else lost)
        return TrackerRun(uploader.state.own_run.run_id)


def _lost_to(fault: Fault) -> Counter[str]:
    """Return the number of losses that a fault causes, by reason.

    If a call with several points is refused, the uploader sends the points again, in two halves. So a refused
    point is lost only if it was sent alone.
    """
    if not fault.refuses:
        return Counter()
    reasons = {"log_alerts": "alerts_rejected", "log_artifact": "artifact_rejected"}
    if fault.failed == "log_points" and len(fault.points) == 1:
        return Counter({f"rejected: {fault.points[0].name}": 1})
    return Counter(reasons[method] for method in [fault.failed] if method in reasons)


_GRAPH = ("flamegraph", "graph.svg")


class OpeningContract(TrackerChecks):
    """Tests that sinks open, find and end the right run."""

    def test_it_has_what_a_sink_has(self) -> None:
        """The sink has all members of the protocol, with valid values."""
        sink = self._own()
        assert isinstance(sink, Sink)
        assert sink.resolution in ("full", "bucketed")
        assert isinstance(sink.durable, bool)
        assert sink.max_points >= 1
        assert dict(sink.dropped) == {}
        sink.close(None)

    def test_opening_again_is_the_same_run(self) -> None:
        """An uploader opens a run again if the first answer was lost."""
        sink = self._own()
        assert sink.open().run_id == sink.open().run_id
        sink.close("finished")

    def test_closing_again_is_harmless(self) -> None:
        """An uploader closes a run again if the first answer was lost."""
        sink = self._own()
        run = sink.open()
        _log(sink, points(3))
        sink.close("failed", ENDED_US)
        sink.close("failed", ENDED_US)
        self._has_ended(run, "failed", ENDED_US)
        self._holds(run, points(3))

    def test_each_end_is_told_and_when(self) -> None:
        """A run gets the status and the end time that ``close`` receives. Each status has its own run."""
        statuses: tuple[Status, ...] = get_args(Status)
        opened = set()
        for status in statuses:
            sink = self._own(f"{RUN}-{status}")
            run = sink.open()
            _log(sink, points(1))
            sink.close(status, ENDED_US)
            self._has_ended(run, status, ENDED_US)
            opened.add(run.run_id)
        assert len(opened) == len(statuses)

    def test_another_sink_finds_the_run_again(self) -> None:
        """The next uploader continues an interrupted uploader's run, even if the run's id was not stored."""
        first = self._own()
        run = first.open()
        _log(first, points(5))
        first.close(None)
        if first.durable:  # otherwise close(None) may have ended the run to store the points
            assert self.status(run.run_id) is None
        for opened in (run, None):
            sink = self.open_sink(Target(RUN, None, opened=opened, begun_us=BEGUN_US))
            assert sink.open().run_id == run.run_id
            sink.close(None)
        self._holds(run, points(5))

    def test_a_run_goes_on_after_a_restart(self) -> None:
        """After a restart of the training, another session continues the run, although the run has ended."""
        sink = self._own()
        run = sink.open()
        _log(sink, points(3))
        sink.close("failed", ENDED_US)
        self.process_ends()
        later = Target(f"{RUN}-2", None, begun_us=BEGUN_US, continues=RUN)
        for target in (later, replace(later, opened=run)):
            sink = self.open_sink(target)
            assert sink.open().run_id == run.run_id
            _log(sink, points(6)[3:])
            sink.close("finished", ENDED_US + 1_000_000)
            self.process_ends()
            self._has_ended(run, "finished", ENDED_US + 1_000_000)
        self._holds(run, points(6), repeated=True)


class PointsContract(TrackerChecks):
    """Tests that a sink stores each point exactly once."""

    def test_points_arrive_as_they_are(self) -> None:
        """Names, indices, times and values arrive unchanged. One call can take ``max_points`` points."""
        sink = self._own()
        made = points(min(sink.max_points, 300))
        run = sink.open()
        sink.log_points(made)
        _log(sink, [])
        assert dict(sink.dropped) == {}
        sink.close(None)
        self._holds(run, made)

    def test_every_axis_and_every_place_arrives(self) -> None:
        """Steps, evaluations and epochs are never mixed, and indices may be as large as in a long run."""
        sink = self._own()
        run = sink.open()
        _log(sink, points_everywhere())
        assert dict(sink.dropped) == {}
        sink.close(None)
        self._holds(run, points_everywhere())

    def test_a_point_that_is_there_changes_nothing(self) -> None:
        """Points that are sent again add no rows, whether the same sink or another sink sends them."""
        run = TrackerRun("")
        for _ in range(2):
            sink = self._own()
            run = sink.open()
            _log(sink, points(20))
            if sink.durable:
                _log(sink, points(20)[5:])
            sink.close(None)
        self._holds(run, points(20), repeated=True)

    def test_the_order_of_calls_is_free(self) -> None:
        """Points may be sent in any order. For example, a step's loss can follow the next step's points."""
        sink = self._own()
        run = sink.open()
        made = points(20)
        for part in (made[10:], made[:10]):
            _log(sink, part)
        sink.close(None)
        self._holds(run, made, ordered=False)

    def test_what_a_tracker_cannot_take_costs_itself_alone(self) -> None:
        """A point with an odd name or value is stored, counted as dropped, or refused; the others arrive."""
        sink = self._own()
        run = sink.open()
        refusals, made = 0, odd_points()
        for index, point in enumerate(made):
            refusals += _raised(lambda: _log(sink, [point])) is TrackerRejectedError  # noqa: B023 - called here
            _log(sink, points(1, first=index))
        sink.close(None)
        good = [(point.name, point.index, point.value) for point in points(len(made))]
        held = Counter(self.rows(run.run_id))
        assert {row: held.pop(row, 0) for row in good} == dict.fromkeys(good, 1)
        assert held.total() + sum(sink.dropped.values()) + refusals == len(made)


class FactsContract(TrackerChecks):
    """Tests that a sink stores each parameter, alert and file exactly once."""

    def test_facts_alerts_and_files_arrive(self, tmp_path: Path) -> None:
        """Parameters, alerts and files arrive exactly once. Files arrive byte for byte."""
        sink = self._own()
        run = sink.open()
        sink.log_parameters(FACTS)
        sink.log_alerts([alert(0), alert(1)], 0)
        sink.log_alerts([alert(0), alert(1), alert(2)], 2)
        sink.log_artifact(*file_in(tmp_path))
        assert dict(sink.dropped) == {}
        sink.close("finished")
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0), alert(1), alert(2)])
        self._holds_files(run, {_GRAPH: CONTENT})

    def test_facts_alerts_and_files_can_be_sent_again(self, tmp_path: Path) -> None:
        """Data that is sent again is not refused. If two files have the same name, the later file stays."""
        sink = self._own()
        run = sink.open()
        for content in (b"first", b"second, and longer"):
            sink.log_parameters({**FACTS, "text": "x" * 10_000, "": "", "ü/ß": "\n"})
            sink.log_alerts([alert(0), alert(1)], 0)
            sink.log_alerts([alert(0), alert(1)], 1)
            sink.log_artifact(*file_in(tmp_path, content))
        sink.close(None)
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0), alert(1)], repeated=True)
        self._holds_files(run, {_GRAPH: b"second, and longer"})


class FailureContract(TrackerChecks):
    """Tests that a sink never loses data silently while its tracker can't be reached."""

    def test_an_unreachable_tracker_is_an_error_until_it_is_back(self) -> None:
        """``probe`` and ``open`` raise `TrackerUnavailableError`. After the outage, calls succeed."""
        sink = self._own()
        run = sink.open()
        with self.down():
            assert _raised(sink.probe) is TrackerUnavailableError
            assert _raised(lambda: _log(sink, points(3))) in (TrackerUnavailableError, None)
            fresh = self._own()
            assert _raised(lambda: _begin(fresh)) is TrackerUnavailableError
        sink.probe()
        _log(sink, points(3))
        sink.close("finished", ENDED_US)
        self._holds(run, points(3), repeated=True)
        self._has_ended(run, "finished", ENDED_US)

    def test_a_durable_sink_stores_or_raises(self, tmp_path: Path) -> None:
        """A durable sink that can't reach its tracker never ignores a call silently."""
        sink = self._own()
        if not sink.durable:  # it may hold data back until its end
            return
        run = sink.open()
        artifact, file = file_in(tmp_path)
        calls: list[Callable[[], object]] = [
            lambda: _log(sink, points(3)),
            lambda: sink.log_parameters(FACTS),
            lambda: sink.log_alerts([alert(0)], 0),
            lambda: sink.log_artifact(artifact, file),
            lambda: sink.close("killed", ENDED_US),
        ]
        with self.down():
            errors = [_raised(call) for call in calls]
        assert set(errors) <= {TrackerUnavailableError, None}
        for call, error in zip(calls, errors, strict=True):
            if error is not None:
                call()
        self._holds(run, points(3))
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0)])
        self._holds_files(run, {_GRAPH: CONTENT})
        self._has_ended(run, "killed", ENDED_US)


class UsersRunContract(TrackerChecks):
    """Tests that memlog's data gets into a user's run, and that the user's own rows stay."""

    def test_a_users_run_gets_points_and_is_never_ended(self, tmp_path: Path) -> None:
        """If `in_process`, the training process writes points. If not, a sink does. The user's rows stay."""
        run = self.user_run()
        if self.in_process:
            self._check_refused(run)
            self._check_in_process(run, tmp_path)
        else:
            self._check_joined(run, tmp_path)

    def _check_joined(self, run: TrackerRun, folder: Path) -> None:
        for status in get_args(Status):
            sink = self.open_sink(Target(RUN, run, begun_us=BEGUN_US))
            assert sink.open().run_id == run.run_id
            _log(sink, points(3))
            sink.log_parameters(FACTS)
            sink.log_alerts([alert(0)], 0)
            sink.log_artifact(*file_in(folder))
            sink.close(status, ENDED_US)
            assert self.status(run.run_id) is None
        self._holds(run, points(3), repeated=True)
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0)], repeated=True)
        self._holds_files(run, {_GRAPH: CONTENT})

    def _check_refused(self, run: TrackerRun) -> None:
        """Check that a sink refuses the user's run. A second writer would damage the user's rows."""
        sink = self.open_sink(Target(RUN, run, begun_us=BEGUN_US))
        assert _raised(sink.open) is TrackerRejectedError
        assert _raised(lambda: _log(sink, points(3))) is TrackerRejectedError
        sink.close("failed")

    def _check_in_process(self, run: TrackerRun, folder: Path) -> None:
        """Check that rows get points only before ``leave_rows``, and that ``log`` adds a point afterwards."""
        user_run, rows = self.open_in_process(run), _OneRow()
        assert user_run.run_id == run.run_id
        assert user_run.watch_rows(rows) is None  # the user has not logged yet
        made = [point for point in points_everywhere() if point.index <= 1_000]
        for number, point in enumerate(made[:-1]):
            rows.points = [point, Point("memory/odd", float("nan"), "step", 3, BEGUN_US)]
            self.user_logs(run, float(number))
        assert rows.left == len(made) - 1
        user_run.leave_rows()
        rows.points = made[:1]
        self.user_logs(run, float(len(made)))
        assert rows.points
        user_run.log(made[-1:], new_row=False)
        user_run.log_parameters(FACTS)
        user_run.log_alert(alert(0))
        user_run.log_artifact(*file_in(folder), RUN)
        was_open = user_run.is_open
        assert self.status(run.run_id) is None
        self.user_ends(run)
        assert (was_open, user_run.is_open) == (True, False)
        assert list(self.user_values(run.run_id)) == [*map(float, range(len(made) - 1)), len(made)]
        held = [row for row in self.rows(run.run_id) if row[0] != "memory/odd"]
        assert sorted(held) == sorted((point.name, point.index, point.value) for point in made)
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0)])
        self._holds_files(run, {_GRAPH: CONTENT})


class SinkContract(
    OpeningContract,
    UsersRunContract,
    PointsContract,
    FactsContract,
    FailureContract,
    DeliveryContract,
):
    """Tests that a sink does what `memlog.sink.Sink` describes. The tests use the sink's real tracker.

    Subclasses implement the methods of `memlog.testing.readback.TrackerReading`. Each test has its own
    tracker, or at least its own runs.
    """


class _OneRow:
    """A `memlog.sink.Rows` with points for one row."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.left = 0

    def enter(self, number: int | None) -> tuple[Sequence[Point], Sequence[Point]]:
        assert number is None
        taken, self.points = self.points, []
        return (), taken

    def leave(self) -> None:
        self.left += 1

    def give_back(self, points: Sequence[Point]) -> None:
        raise AssertionError(points)

    def failed(self, error: Exception) -> None:
        raise error


def _log(sink: Sink, made: Sequence[Point]) -> None:
    """Send points, as many in each call as the sink takes."""
    for begin in range(0, max(len(made), 1), sink.max_points):
        sink.log_points(made[begin : begin + sink.max_points])


def _begin(sink: Sink) -> None:
    sink.probe()
    sink.open()


def _raised(call: Callable[[], object]) -> type[Exception] | None:
    try:
        call()
    except DeliveryError as error:
        return type(error)
    return None
