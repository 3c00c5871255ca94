"""A run that the tracker refuses delays no other, and gets everything after it is restored."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import GIB, MadeRun, batch
from support.sinks import ListTracker

from memlog.delivery.helper.retention import Retention
from memlog.delivery.uploader.open_runs import RETRY_INTERVAL
from memlog.delivery.uploader.retrying_worker import UploadWorker
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Batch, End, Parameters
from memlog.journal import JournalFile, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.metrics import Plan
from memlog.sink import Point

SWEEP = 4
STEPS = 10


def uploader(run: RunDirectory, tracker: ListTracker, *, replace: bool = False) -> Uploader:
    return Uploader(run, "list", tracker.open_sink, may_open_own=True, may_replace=replace)


def expected(steps: Iterable[int]) -> list[Point]:
    plan: Plan[int] = Plan("bucketed")
    return [point for s in steps for point in plan.feed(batch(s, GIB), s)] + plan.flush()


def wanted(number: int) -> list[Point]:
    return expected(range(number * STEPS, (number + 1) * STEPS))


@pytest.fixture
def sweep(tmp_path: Path) -> RunDirectory:
    """One session with four runs of the user's, one after the other."""
    made = MadeRun(tmp_path)
    for number in range(SWEEP):
        made.bound("list", f"r{number}", None)
        made.write(*(batch(s, GIB) for s in range(number * STEPS, (number + 1) * STEPS)))
    made.write(End(1, "finished"))
    return made.closed()


def finish(upload: Uploader) -> None:
    upload.deliver(complete=True)
    upload.close()


def test_the_others_have_everything_and_the_refused_run_is_named(sweep: RunDirectory) -> None:
    tracker = ListTracker(deleted={"r0", "r2"})
    finish(uploader(sweep, tracker))
    assert tracker.points == {"r1": wanted(1), "r3": wanted(3)}
    state = UploadState.load(sweep, "list")
    assert (state.stage, state.dropped, set(state.refused)) == ("waiting", {}, {"r0", "r2"})
    assert state.problem == (
        "the run r0 is deleted; the run r2 is deleted: nothing is lost, "
        f"`{sweep.command('sync')}` delivers the rest once they exist again, or "
        f"`{sweep.command('sync')} --own-run` delivers it to runs of memlog's own"
    )


def test_one_that_is_gone_for_good_is_replaced_where_that_is_wanted(sweep: RunDirectory) -> None:
    tracker = ListTracker(deleted={"r0", "r2"})
    finish(uploader(sweep, tracker))
    finish(uploader(sweep, tracker, replace=True))
    assert tracker.points["beside-r0"] == wanted(0)
    assert tracker.points["beside-r2"] == wanted(2)
    assert tracker.ended["beside-r0"] == "finished"
    state = UploadState.load(sweep, "list")
    assert (state.stage, state.beside, state.deferred) == ("done", ["r0", "r2"], {})
    finish(uploader(sweep, tracker))  # a second delivery without refusals: nothing is doubled
    assert len(tracker.all_points()) == SWEEP * STEPS * 2


def test_an_own_run_that_is_gone_for_good_is_replaced_likewise(tmp_path: Path) -> None:
    made, tracker = MadeRun(tmp_path, alive=True), ListTracker()
    made.write(*(batch(s, GIB) for s in range(STEPS)))
    uploader(made.directory, tracker).deliver()
    own = f"own-{made.directory.id}"
    tracker.deleted = {own}
    made.write(*(batch(s, GIB) for s in range(STEPS, 2 * STEPS)), End(1, "finished"))
    finish(uploader(made.directory, tracker))
    assert UploadState.load(made.directory, "list").stage == "waiting"
    finish(uploader(made.directory, tracker, replace=True))
    assert tracker.all_points() == expected(range(2 * STEPS))
    assert tracker.ended[f"{own}-anew"] == "finished"


def test_alerts_files_and_parameters_wait_with_it(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True).bound("list", "gone", None)
    made.directory.artifacts.mkdir()
    (made.directory.artifacts / "notes.txt").write_text("kept")
    tracker = ListTracker()
    upload = uploader(made.directory, tracker)
    made.write(batch(0, GIB))
    upload.deliver()
    tracker.deleted = {"gone"}
    file = Artifact(1, "notes.txt", "report", "artifacts/notes.txt", 4)
    alert = Alert(1, 1, "error", "rule", "high", "text")
    made.write(Parameters(1, {"a": "b"}), alert, file, batch(1, GIB)).bound("list", "next", None)
    made.write(alert, file)
    finish(upload)
    assert list(tracker.alerts) == list(tracker.files) == ["next"]
    tracker.deleted = set()
    finish(uploader(made.directory, tracker))
    assert {name: len(alerts) for name, alerts in tracker.alerts.items()} == {"next": 1, "gone": 1}
    assert tracker.files["gone"] == tracker.files["next"]
    assert tracker.parameters == {"gone": {"a": "b"}}
    assert UploadState.load(made.directory, "list").dropped == {}


def test_an_outbox_of_a_refused_run_holds_up_no_other(tmp_path: Path) -> None:
    """The alert is in the outbox when its run is deleted."""
    made, tracker = MadeRun(tmp_path, alive=True).bound("list", "gone", None), ListTracker()
    alert = Alert(1, 1, "error", "rule", "high", "text")
    made.write(alert)
    upload = uploader(made.directory, tracker)
    upload.deliver()
    upload.state.outbox.alerts["gone"].sent = 0
    tracker.deleted = {"gone"}
    made.bound("list", "next", None).write(alert)
    finish(upload)
    assert [len(tracker.alerts[name]) for name in ("gone", "next")] == [1, 1]
    tracker.deleted = set()
    finish(uploader(made.directory, tracker))
    assert [len(tracker.alerts[name]) for name in ("gone", "next")] == [2, 1]


def test_a_refused_run_is_asked_for_now_and_then_and_at_the_end(
    sweep: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("memlog.delivery.uploader.open_runs.time.monotonic", lambda: now[0])
    tracker = ListTracker(deleted={"r0"})
    upload = uploader(sweep, tracker)
    for _ in range(5):
        upload.deliver()
    assert tracker.asked.count("r0") == 1
    now[0] += RETRY_INTERVAL
    upload.deliver()
    upload.deliver()
    assert tracker.asked.count("r0") == 2
    tracker.deleted = set()
    finish(upload)
    assert tracker.points["r0"] == wanted(0)


def test_finish_does_not_wait_for_what_does_not_change_by_itself(sweep: RunDirectory) -> None:
    thread = UploadWorker(uploader(sweep, ListTracker(deleted={"r0", "r3"})))
    thread.complete()
    thread.start()
    assert thread.join(30)
    assert not thread.delivered


def test_whatever_else_a_sink_refuses_as_it_is_opened_is_that_runs_alone(
    sweep: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third party's sink may raise the general error in place of `RunRefusedError`."""
    tracker = ListTracker(deleted={"r1"})
    monkeypatch.setattr("support.sinks.RunRefusedError", TrackerRejectedError)
    finish(uploader(sweep, tracker))
    assert tracker.points == {f"r{n}": wanted(n) for n in (0, 2, 3)}


@pytest.fixture
def few_nested_calls() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("few_nested_calls")
def test_more_runs_than_python_nests_calls_are_skipped(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True)
    runs = 420
    for number in range(runs):
        made.bound("list", f"r{number}", None).write(batch(number, GIB))
    tracker = ListTracker(deleted={f"r{n}" for n in range(runs - 1)})
    finish(uploader(made.directory, tracker))
    assert tracker.points == {f"r{runs - 1}": expected([runs - 1])}
    problem = UploadState.load(made.directory, "list").problem or ""
    assert "and 416 more runs like these" in problem


def test_what_an_older_memlog_kept_is_read(sweep: RunDirectory) -> None:
    tracker = ListTracker()
    uploader(sweep, tracker).deliver()
    path = sweep.delivery / "list.json"
    kept = json.loads(path.read_text())
    for new in ("held", "refused", "beside"):
        del kept[new]
    path.write_text(json.dumps(kept))
    finish(uploader(sweep, tracker))
    assert UploadState.load(sweep, "list").stage == "done"
    assert tracker.points == {f"r{n}": wanted(n) for n in range(SWEEP)}


def test_what_a_refused_run_has_not_had_is_not_thinned_as_delivered(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True, segment_bytes=16 * 1024)
    steps = 400
    for number in range(3):
        made.bound("list", f"r{number}", None)
        made.write(*(batch(s, GIB) for s in range(number * steps, (number + 1) * steps)))
    run, tracker = made.directory, ListTracker(deleted={"r1"})
    upload = uploader(run, tracker)
    upload.deliver()
    size = run.files()[0].size
    enforce(run, size * 3 // 4)  # the points that were delivered are enough for this
    assert sum(file.thinned for file in read(run)) > 0
    assert sum(file.thinned_undelivered for file in read(run)) == 0
    tracker.deleted = set()
    finish(upload)
    assert tracker.points["r1"] == expected(range(steps, 2 * steps))


def enforce(run: RunDirectory, limit: int) -> None:
    retention = Retention(run, limit, ("list",))
    while retention.enforce():
        pass


def read(run: RunDirectory) -> list[JournalFile]:
    files = run.files()
    for file in files:
        list(file.read())
    return files


class Sweep:
    """A trainer whose runs are deleted and restored during training, and an uploader that is replaced."""

    def __init__(self, directory: str, *, thinned: bool) -> None:
        self.made = MadeRun(Path(directory), alive=True).bound("list", "r0", None)
        self.tracker = ListTracker()
        self.owners: dict[int, str] = {}
        self._current = "r0"
        self._thinned = thinned
        self.restart(0)

    def restart(self, _: int) -> None:
        self.upload = uploader(self.made.directory, self.tracker)

    def steps(self, number: int) -> None:
        for _ in range(3 + 20 * number):
            step = len(self.owners)
            self.owners[step] = self._current
            self.made.write(batch(step, GIB))

    def turn(self, number: int) -> None:
        self._current = f"r{number}"
        self.made.bound("list", self._current, None)

    def delete(self, number: int) -> None:
        self.tracker.deleted.add(f"r{number}")

    def restore(self, number: int) -> None:
        self.tracker.deleted.discard(f"r{number}")

    def thin(self, _: int) -> None:
        if self._thinned:
            enforce(self.made.directory, 4096)

    def deliver(self, _: int) -> None:
        self.upload.deliver()

    def fail(self, _: int) -> None:
        self.tracker.down = True
        with suppress(TrackerUnavailableError):
            self.upload.deliver()
        self.tracker.down = False

    def left(self) -> set[int]:
        """Numbers of the steps in the journal."""
        events = list(self.made.directory.events())
        return {event.step for event in events if isinstance(event, Batch)}


MOVES = ("steps", "turn", "deliver", "fail", "restart", "delete", "restore", "thin")


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 2)), max_size=40), st.booleans())
@pytest.mark.slow
def test_whatever_is_deleted_and_restored_every_point_arrives_once(
    moves: list[tuple[str, int]], thinned: bool
) -> None:
    """Any order of runs, steps, deliveries, failures, new uploaders, deletions and thinning."""
    with tempfile.TemporaryDirectory() as directory:
        sweep = Sweep(directory, thinned=thinned)
        for move, number in moves:
            getattr(sweep, move)(number)
        finish(sweep.upload)  # an end at which the tracker can refuse some runs
        sweep.tracker.deleted.clear()
        sweep.restart(0)
        finish(sweep.upload)
        had = Counter(
            (name, point.name, point.index)
            for name, points in sweep.tracker.points.items()
            for point in points
        )
        assert [key for key, count in had.items() if count > 1] == []
        assert all(sweep.owners[index] == name for name, _, index in had)
        assert sweep.left() <= {index for _, _, index in had}
        state = sweep.upload.state
        assert (state.dropped, state.deferred, state.refused) == ({}, {}, {})
        if not thinned:
            assert state.delivered == len(had) == 2 * len(sweep.owners)
