"""What every sink must do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Status
from memlog.journal import RunDirectory
from memlog.sink import Point, Sink, Target, TrackerRun
from memlog.testing.interrupted import Fault, InterruptedSink, OddError, odd, refused, unavailable
from memlog.testing.made import (
    BEGUN_US,
    CONTENT,
    ENDED_US,
    FACTS,
    alert,
    file_in,
    odd_points,
    plan_of,
    points,
    points_everywhere,
    recorded,
)
from memlog.testing.readback import RUN, TrackerReading

_AT_MOST = 200
"""Calls that delivering the contract's run takes, at most."""
_GRAPH = ("flamegraph", "graph.svg")
_SOURCE = ("file", "source")


class SinkContract(TrackerReading):
    """Tests that a sink keeps the promises of `memlog.sink.Sink`, against its real tracker.

    Subclasses implement the methods of `memlog.testing.readback.TrackerReading`; each test has a tracker,
    or at least runs, of its own.
    """

    # The shape

    def test_it_has_what_a_sink_has(self) -> None:
        """All of the protocol, of the right kinds."""
        sink = self._own()
        assert isinstance(sink, Sink)
        assert sink.resolution in ("full", "bucketed")
        assert isinstance(sink.durable, bool)
        assert sink.max_points >= 1
        assert dict(sink.dropped) == {}
        sink.close(None)

    # Opening and closing

    def test_opening_again_is_the_same_run(self) -> None:
        """An uploader opens again whenever it is not sure."""
        sink = self._own()
        assert sink.open().run_id == sink.open().run_id
        sink.close("finished")

    def test_closing_again_is_harmless(self) -> None:
        """An uploader closes again whenever it is not sure."""
        sink = self._own()
        run = sink.open()
        _log(sink, points(3))
        sink.close("failed", ENDED_US)
        sink.close("failed", ENDED_US)
        self._has_ended(run, "failed", ENDED_US)
        self._holds(run, points(3))

    def test_each_end_is_told_and_when(self) -> None:
        """A run that was killed has not finished; each is a run of its own."""
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
        """The one before died: its run goes on, whether anybody remembered its id or not."""
        first = self._own()
        run = first.open()
        _log(first, points(5))
        first.close(None)
        if first.durable:  # otherwise all that is there may depend on an end
            assert self.status(run.run_id) is None
        for opened in (run, None):
            sink = self.open_sink(Target(RUN, None, opened=opened, begun_us=BEGUN_US))
            assert sink.open().run_id == run.run_id
            sink.close(None)
        self._holds(run, points(5))

    def test_a_users_run_is_joined_or_ridden_and_never_ended(self, tmp_path: Path) -> None:
        """It is the user's, and so are the rows that are in it."""
        run = self.user_run()
        if self.in_process:
            self._is_refused(run)
            self._is_ridden(run, tmp_path)
        else:
            self._is_joined(run, tmp_path)

    # Points

    def test_points_arrive_as_they_are(self) -> None:
        """With their names, places, times and values; in one call as many as it says that it takes."""
        sink = self._own()
        made = points(min(sink.max_points, 300))
        run = sink.open()
        sink.log_points(made)
        _log(sink, [])
        assert dict(sink.dropped) == {}
        sink.close(None)
        self._holds(run, made)

    def test_every_axis_and_every_place_arrives(self) -> None:
        """Steps, evaluations and epochs are never mixed, and a long run has large numbers."""
        sink = self._own()
        run = sink.open()
        _log(sink, points_everywhere())
        assert dict(sink.dropped) == {}
        sink.close(None)
        self._holds(run, points_everywhere())

    def test_a_point_that_is_there_changes_nothing(self) -> None:
        """Sent again by the same sink, and by one that knows nothing of the first."""
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
        """Losses are known late, and two processes' points come one after the other."""
        sink = self._own()
        run = sink.open()
        made = points(20)
        for part in (made[10:], made[:10]):
            _log(sink, part)
        sink.close(None)
        self._holds(run, made, ordered=False)

    def test_what_a_tracker_cannot_take_costs_itself_alone(self) -> None:
        """Names and numbers that no tracker likes are stored, or counted, or refused: nothing else."""
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

    # Parameters, alerts and files

    def test_facts_alerts_and_files_arrive(self, tmp_path: Path) -> None:
        """Each of them once, and what is kept is kept byte for byte."""
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
        """None of them is refused the second time; of two files of a name the later one stays."""
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

    # Trouble

    def test_out_of_reach_it_says_so_and_goes_on_later(self) -> None:
        """Whatever is called, the error says that trying again can help; then it does."""
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

    def test_what_is_safe_at_once_is_stored_or_an_error(self, tmp_path: Path) -> None:
        """A durable sink that can't reach its tracker never passes anything over in silence."""
        sink = self._own()
        if not sink.durable:  # what it was given waits in it
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
            told = [_raised(call) for call in calls]
        assert set(told) <= {TrackerUnavailableError, None}
        for call, error in zip(calls, told, strict=True):
            if error is not None:
                call()
        self._holds(run, points(3))
        self._holds_facts(run, FACTS)
        self._holds_alerts(run, [alert(0)])
        self._holds_files(run, {_GRAPH: CONTENT})
        self._has_ended(run, "killed", ENDED_US)

    def test_a_whole_run_arrives_once(self, tmp_path: Path) -> None:
        """Where nothing fails, nothing stands there twice, whether it is safe at once or not."""
        run = recorded(tmp_path)
        tracked = self._deliver(run, Fault(-1))
        self._has_all_of(run, tracked, Fault(-1), repeated=False)

    def test_a_failure_at_any_call_loses_nothing_and_doubles_nothing(self, tmp_path: Path) -> None:
        """Each call in turn fails before or after it was done, and another uploader takes over."""
        for answered in (False, True):
            folder = tmp_path / str(answered)
            self._survives(folder, lambda at: Fault(at, answered=answered, error=unavailable))  # noqa: B023 - called here

    def test_a_refusal_of_any_call_costs_that_alone(self, tmp_path: Path) -> None:
        """What a tracker has refused is counted, and everything else arrives."""
        self._survives(tmp_path, lambda at: Fault(at, error=refused))

    def test_an_odd_error_of_any_call_loses_nothing(self, tmp_path: Path) -> None:
        """A client may raise anything: that counts as out of reach, done or not."""
        self._survives(tmp_path, lambda at: Fault(at, answered=True, error=odd))

    def test_events_of_a_newer_memlog_are_passed_over(self, tmp_path: Path) -> None:
        """They are counted by whoever reads the journal; what is known arrives."""
        run = recorded(tmp_path, b'[999,["from_the_future",1,{"a":[1]}]]\n')
        tracked = self._deliver(run, Fault(-1))
        self._has_all_of(run, tracked, Fault(-1), repeated=False)

    # What the tests above share

    def _is_joined(self, run: TrackerRun, folder: Path) -> None:
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

    def _is_refused(self, run: TrackerRun) -> None:
        """A sink that wrote beside the user would spoil the user's rows."""
        sink = self.open_sink(Target(RUN, run, begun_us=BEGUN_US))
        assert _raised(sink.open) is TrackerRejectedError
        assert _raised(lambda: _log(sink, points(3))) is TrackerRejectedError
        sink.close("failed")

    def _is_ridden(self, run: TrackerRun, folder: Path) -> None:
        """Values go into the rows that the user commits, in the same call, and what is left into one more."""
        user_run, rows = self.open_in_process(run), _OneEach()
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

    def _survives(self, root: Path, fault_at: Callable[[int], Fault]) -> None:
        """An uploader meets a fault at each call in turn; another one goes on, and all is there."""
        for at in range(_AT_MOST):
            fault = fault_at(at)
            run = recorded(root / str(at))
            with suppress(DeliveryError, OddError):
                self._deliver(run, fault)
            self.process_ends()
            tracked = self._deliver(run, Fault(-1), lost=_lost_to(fault))
            self._has_all_of(run, tracked, fault, repeated=fault.struck is not None)
            if fault.struck is None:
                return
        raise AssertionError(f"delivering takes more than {_AT_MOST} calls")

    def _has_all_of(
        self, run: RunDirectory, tracked: TrackerRun, fault: Fault, *, repeated: bool
    ) -> None:
        """All of a recorded run, but for what a refusal has cost."""
        lost = _lost_to(fault)
        alone = fault.points if fault.refuses and len(fault.points) == 1 else ()
        wanted = [point for point in plan_of(run) if point not in alone]
        self._holds(tracked, wanted, repeated=repeated, ordered=False)
        if not (fault.struck == "log_parameters" and fault.refuses):
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
            return InterruptedSink(self.open_sink(target), fault)

        uploader = Uploader(run, "conformance", open_sink, begun_us=BEGUN_US, may_open_own=True)
        uploader.deliver(complete=True)
        uploader.close()
        if uploader.refused is not None:
            raise TrackerRejectedError(uploader.refused)
        assert uploader.state.own_run is not None
        assert uploader.state.dropped == (_lost_to(fault) if lost is None else lost)
        return TrackerRun(uploader.state.own_run.run_id)


class _OneEach:
    """A `memlog.sink.Rows` that has points for one row."""

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


def _lost_to(fault: Fault) -> Counter[str]:
    """What counts as lost to a fault: a single point that was refused (of several, halves are sent again)."""
    if not fault.refuses:
        return Counter()
    reasons = {"log_alerts": "alerts_rejected", "log_artifact": "artifact_rejected"}
    if fault.struck == "log_points" and len(fault.points) == 1:
        return Counter({f"rejected: {fault.points[0].name}": 1})
    return Counter(reasons[method] for method in [fault.struck] if method in reasons)


def _log(sink: Sink, made: Sequence[Point]) -> None:
    """Hands points over, as many at once as the sink takes."""
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
