"""What every sink must do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from memlog.delivery.courier import Courier
from memlog.errors import DeliveryError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Batch, End, Event, Parameters, Run, Status
from memlog.health import Health
from memlog.journal import JournalWriter, RunDirectory, new_run
from memlog.journal.kept import keep
from memlog.metrics import Plan
from memlog.sink import Point, Ride, Sink, Target, TrackerRun
from memlog.testing.interrupted import Fault, InterruptedSink

Row: TypeAlias = tuple[str, int, float]
"""What a tracker holds of a point: the metric's name, where on its axis, and the value."""

BEGUN_US = 1_795_000_000_000_000
_STEPS = 60
_RUN = "conformance"
_AT_MOST = 200
"""Calls that delivering the contract's run takes, at most."""


class SinkContract:
    """Tests that a sink keeps the promises of `memlog.sink.Sink`, against its real tracker.

    Subclasses implement the methods that raise `NotImplementedError`; each test has a tracker, or at
    least runs, of its own.
    """

    rides = False
    """As the backend's ``rides``: a user's run is no sink's to join, but is written from the trainer's own
    process. Its ride is tested in the place of joining, for which four more methods are needed."""

    def open_sink(self, target: Target) -> Sink:
        """A new sink for ``target``, as its backend's ``open_sink`` makes it; the connection is yours."""
        raise NotImplementedError

    def user_run(self) -> TrackerRun:
        """Opens a run as a user would, and leaves it open."""
        raise NotImplementedError

    def open_ride(self, run: TrackerRun) -> Ride:
        """A ride on a run of `user_run`, as the backend's ``open_ride`` makes it; where it `rides`."""
        raise NotImplementedError

    def user_logs(self, run: TrackerRun, value: float) -> None:
        """Commits one row of the user's with this value, as a user would; where it `rides`."""
        raise NotImplementedError

    def user_values(self, run_id: str) -> Sequence[float]:
        """The user's own values that the tracker holds, in their order; where it `rides`."""
        raise NotImplementedError

    def user_ends(self, run: TrackerRun) -> None:
        """Ends a run of `user_run`, as a user would; where it `rides`."""
        raise NotImplementedError

    def rows(self, run_id: str) -> Sequence[Row]:
        """Every row of memlog's that the tracker holds for a run, read by the tracker's own client."""
        raise NotImplementedError

    def status(self, run_id: str) -> Status | None:
        """How a run ended, as the tracker has it; ``None``: it has not."""
        raise NotImplementedError

    def down(self) -> AbstractContextManager[object]:
        """While it is entered, the tracker can't be reached."""
        raise NotImplementedError

    def process_ends(self) -> None:
        """Where a client keeps account of the runs its process has open: as if that process had ended."""

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
        """A courier opens again whenever it is not sure."""
        sink = self._own()
        assert sink.open().run_id == sink.open().run_id
        sink.close("finished")

    def test_closing_again_is_harmless(self) -> None:
        """A courier closes again whenever it is not sure."""
        sink = self._own()
        run = sink.open()
        _log(sink, _points(3))
        sink.close("failed", BEGUN_US + 10**6)
        sink.close("failed", BEGUN_US + 10**6)
        assert self.status(run.run_id) == "failed"
        self._holds(run, _points(3))

    def test_another_sink_finds_the_run_again(self) -> None:
        """The one before died: its run goes on, whether anybody remembered its id or not."""
        first = self._own()
        run = first.open()
        _log(first, _points(5))
        first.close(None)
        for opened in (run, None):
            sink = self.open_sink(Target(_RUN, None, opened=opened, begun_us=BEGUN_US))
            assert sink.open().run_id == run.run_id
            sink.close(None)

    def test_a_users_run_is_joined_or_ridden_and_never_ended(self) -> None:
        """It is the user's, and so are the rows that are in it."""
        run = self.user_run()
        if self.rides:
            self._is_refused(run)
            self._is_ridden(run)
        else:
            self._is_joined(run)

    # Points

    def test_points_arrive_as_they_are(self) -> None:
        """With their names, places and values; in one call as many as it says that it takes."""
        sink = self._own()
        points = _points(min(sink.max_points, 300))
        run = sink.open()
        sink.log_points(points)
        _log(sink, [])
        sink.close(None)
        self._holds(run, points)

    def test_a_point_that_is_there_changes_nothing(self) -> None:
        """Sent again by the same sink, and by one that knows nothing of the first."""
        run = TrackerRun("")
        for _ in range(2):
            sink = self._own()
            run = sink.open()
            _log(sink, _points(20))
            if sink.durable:
                _log(sink, _points(20)[5:])
            sink.close(None)
        self._holds(run, _points(20))

    def test_the_order_of_calls_is_free(self) -> None:
        """Losses are known late, and two processes' points come one after the other."""
        sink = self._own()
        run = sink.open()
        points = _points(20)
        for part in (points[10:], points[:10]):
            _log(sink, part)
        sink.close(None)
        self._holds(run, points)

    def test_what_a_tracker_cannot_take_costs_itself_alone(self) -> None:
        """Names and numbers that no tracker likes are stored, or counted, or refused: nothing else."""
        sink = self._own()
        run = sink.open()
        for index, point in enumerate(_odd_points()):
            with suppress(TrackerRejectedError):
                _log(sink, [point])
            _log(sink, _points(1, first=index))
        sink.close(None)
        good = _points(len(_odd_points()))
        names = {point.name for point in good}
        assert {row for row in self.rows(run.run_id) if row[0] in names} == set(_rows(good))

    # Parameters, alerts and files

    def test_facts_alerts_and_files_can_be_sent_again(self, tmp_path: Path) -> None:
        """None of them is refused the second time."""
        (tmp_path / "graph.svg").write_bytes(b"<svg/>")
        artifact = Artifact(BEGUN_US, "graph.svg", "flamegraph", "artifacts/graph.svg", 6)
        sink = self._own()
        sink.open()
        for _ in range(2):
            sink.log_parameters({"torch": "2.9", "text": "x" * 10_000, "": "", "ü/ß": "\n"})
            sink.log_alerts([_alert(0), _alert(1)], 0)
            sink.log_alerts([_alert(0), _alert(1)], 1)
            sink.log_artifact(artifact, tmp_path / "graph.svg")
        sink.close(None)

    # Trouble

    def test_out_of_reach_it_says_so_and_goes_on_later(self) -> None:
        """Whatever is called, the error says that trying again can help; then it does."""
        sink = self._own()
        run = sink.open()
        with self.down():
            assert _raised(sink.probe) is TrackerUnavailableError
            assert _raised(lambda: _log(sink, _points(3))) in (TrackerUnavailableError, None)
            fresh = self._own()
            assert _raised(lambda: _begin(fresh)) is TrackerUnavailableError
        sink.probe()
        _log(sink, _points(3))
        sink.close("finished")
        self._holds(run, _points(3))

    def test_a_failure_at_any_call_loses_nothing_and_doubles_nothing(self, tmp_path: Path) -> None:
        """Each call in turn fails before or after it was done, and another courier takes over."""
        for answered in (False, True):
            for at in range(_AT_MOST):
                run = self._recorded(tmp_path / f"{answered}-{at}")
                fault = Fault(at, answered=answered)
                with suppress(DeliveryError):
                    self._deliver(run, fault)
                self.process_ends()
                tracked = self._deliver(run, Fault(-1, answered=False))
                self._holds(tracked, _plan_of(run))
                assert self.status(tracked.run_id) == "failed"
                if not fault.happened:
                    break
            else:
                raise AssertionError(f"delivering takes more than {_AT_MOST} calls")

    def test_events_of_a_newer_memlog_are_passed_over(self, tmp_path: Path) -> None:
        """They are counted by whoever reads the journal; what is known arrives."""
        run = self._recorded(tmp_path, b'[999,["from_the_future",1,{"a":[1]}]]\n')
        tracked = self._deliver(run, Fault(-1, answered=False))
        self._holds(tracked, _plan_of(run))

    # What the tests above share

    def _is_joined(self, run: TrackerRun) -> None:
        sink = self.open_sink(Target(_RUN, run, begun_us=BEGUN_US))
        assert sink.open().run_id == run.run_id
        _log(sink, _points(3))
        sink.close("failed")
        assert self.status(run.run_id) is None
        self._holds(run, _points(3))

    def _is_refused(self, run: TrackerRun) -> None:
        """A sink that wrote beside the user would spoil the user's rows."""
        sink = self.open_sink(Target(_RUN, run, begun_us=BEGUN_US))
        assert _raised(sink.open) is TrackerRejectedError
        assert _raised(lambda: _log(sink, _points(3))) is TrackerRejectedError
        sink.close("failed")

    def _is_ridden(self, run: TrackerRun) -> None:
        """Values join the row that the user commits next; within it the last one counts."""
        ride = self.open_ride(run)
        assert ride.run_id == run.run_id
        for point in _points(3):
            before = ride.row()
            ride.log([replace(point, value=-1.0)])
            ride.log([point])
            assert ride.row() == before
            self.user_logs(run, float(point.index))
            assert before is None or ride.row() != before
        ride.log([Point("memory/odd", float("nan"), "step", 3, BEGUN_US)])
        ride.log_parameters({"torch": "2.9"})
        ride.log_alert(_alert(0))
        was_open = ride.is_open
        assert self.status(run.run_id) is None
        self.user_ends(run)
        assert (was_open, ride.is_open) == (True, False)
        assert list(self.user_values(run.run_id)) == [0.0, 1.0, 2.0]
        rows = [row for row in self.rows(run.run_id) if row[0] != "memory/odd"]
        assert sorted(rows) == sorted(_rows(_points(3)))

    def _own(self) -> Sink:
        return self.open_sink(Target(_RUN, None, begun_us=BEGUN_US))

    def _holds(self, run: TrackerRun, points: Sequence[Point]) -> None:
        """The tracker holds these points and no others, each of them once."""
        held = Counter(self.rows(run.run_id))
        assert sorted(held) == sorted(set(_rows(points)))
        if self._own().durable:
            assert [row for row, count in held.items() if count != 1] == []

    def _deliver(self, run: RunDirectory, fault: Fault) -> TrackerRun:
        def open_sink(target: Target) -> Sink:
            return InterruptedSink(self.open_sink(target), fault)

        courier = Courier(run, "conformance", open_sink, begun_us=BEGUN_US, may_open_own=True)
        courier.deliver(complete=True)
        courier.close()
        assert courier.state.own_run is not None
        assert courier.state.dropped == {}
        return TrackerRun(courier.state.own_run.run_id)

    def _recorded(self, root: Path, foreign: bytes = b"") -> RunDirectory:
        """A run of everything that a tracker can get, over now."""
        run = new_run(root)
        journal = JournalWriter(
            run.path, run=run.id, role="trainer", begun_us=BEGUN_US, health=Health()
        )
        (root / "source").write_bytes(b"content")
        artifact = keep(run, root / "source", "source", "file")
        for event in (*_events(), artifact, _alert(3), End(BEGUN_US + 10**9, "failed")):
            journal.append(event)
        journal.close()
        if foreign:
            path = next(run.path.glob("*.jsonl"))
            path.write_bytes(path.read_bytes() + foreign)
        return run


def _log(sink: Sink, points: Sequence[Point]) -> None:
    """Hands points over, as many at once as the sink takes."""
    for begin in range(0, max(len(points), 1), sink.max_points):
        sink.log_points(points[begin : begin + sink.max_points])


def _begin(sink: Sink) -> None:
    sink.probe()
    sink.open()


def _raised(call: object) -> type[Exception] | None:
    assert callable(call)
    try:
        call()
    except DeliveryError as error:
        return type(error)
    return None


def _events() -> list[Event]:
    steps = [
        Batch(BEGUN_US + step * 1500, step, 2**30 + step * 2**20, 2**31, "watermark")
        for step in range(_STEPS)
    ]
    return [
        Run(BEGUN_US, None, None, (), {}),
        Parameters(BEGUN_US, {"torch": "2.9"}),
        *steps,
    ]


def _plan_of(run: RunDirectory) -> list[Point]:
    points: list[Point] = []
    for file in run.files():
        plan: Plan[int] = Plan("full")
        for at, entry in enumerate(file.read()):
            points += plan.feed(entry.event, at)
        points += plan.flush()
    return points


def _points(count: int, first: int = 0) -> list[Point]:
    return [
        Point("memory/host/rss_mib", 100.5 + step, "step", step, BEGUN_US + step * 1500)
        for step in range(first, first + count)
    ]


def _odd_points() -> list[Point]:
    names = (
        "",
        " ",
        "a" * 1000,
        "ü/ß",
        "../../etc/passwd",
        "/etc/passwd",
        "a\nb\0c",
        "%s$(x)`;'\"",
    )
    values = (float("inf"), float("-inf"), float("nan"), 1e308, -0.0)
    return [
        *(Point(name, 1.0, "step", 0, BEGUN_US) for name in names),
        *(Point("memory/odd", value, "step", 0, BEGUN_US) for value in values),
        Point("memory/odd", 1.0, "step", 2**63 - 1, BEGUN_US),
        Point("memory/odd", 1.0, "step", -1, 0),
    ]


def _alert(step: int) -> Alert:
    return Alert(BEGUN_US + step * 1500, step, "warning", "host.rss > 1 GiB", f"at {step}", "text")


def _rows(points: Sequence[Point]) -> list[Row]:
    return [(point.name, point.index, point.value) for point in points]
