"""An uploader sends exactly the plan's points, wherever it is stopped and started again."""

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.journals import bury
from support.sinks import ListTracker

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.run_pages import late_events
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import DeliveryError, RunRefusedError, TrackerUnavailableError
from memlog.events import Artifact, Batch, End
from memlog.journal import Binding, JournalWriter, RunDirectory, new_run
from memlog.journal.delivery_state import UploadLock, UploadState
from memlog.metrics import Plan
from memlog.sink import Point, TrackerRun

MIB = 1024**2


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def writer(run: RunDirectory) -> JournalWriter:
    return JournalWriter(
        run.path, run=run.id, role="trainer", begun_us=1, diagnostics=Diagnostics()
    )


def batch(step: int) -> Batch:
    return Batch(step * 1000, step, step * MIB, step * MIB, "exact")


def expected(steps: range) -> list[Point]:
    plan: Plan[int] = Plan("bucketed")
    return [point for step in steps for point in plan.feed(batch(step), step)] + plan.flush()


def uploader(run: RunDirectory, tracker: ListTracker, *, own: bool = True) -> Uploader:
    return Uploader(run, "list", tracker.open_sink, may_open_own=own)


def test_a_whole_journal_arrives_once(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker()
    for step in range(50):
        journal.append(batch(step))
    journal.append(End(99, "failed"))
    upload = uploader(run, tracker)
    assert upload.deliver(complete=True) == 100
    upload.close()
    assert tracker.all_points() == expected(range(50))
    assert tracker.ended == {f"own-{run.id}": "failed"}
    assert tracker.ended_us == {f"own-{run.id}": 99}
    assert UploadState.load(run, "list").stage == "done"


def test_delivery_follows_the_journal_as_it_grows(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker()
    upload = uploader(run, tracker)
    for step in range(30):
        journal.append(batch(step))
        upload.deliver()
        # The newest step can still get another value. Its points are final when the next step begins.
        assert tracker.all_points() == expected(range(step + 1))[: 2 * step]
    upload.deliver(complete=True)
    assert tracker.all_points() == expected(range(30))


def test_a_tracker_that_is_down_is_reported_without_secrets(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker(crash_after=0)
    journal.append(batch(0))
    upload = uploader(run, tracker)
    with pytest.raises(TrackerUnavailableError) as raised:
        upload.deliver(complete=True)
    assert "secret" not in str(raised.value)
    assert UploadState.load(run, "list").stage == "unreachable"
    assert b"secret" not in (run.delivery / "list.json").read_bytes()


def test_one_bad_value_never_costs_a_batch(run: RunDirectory) -> None:
    journal = writer(run)
    tracker = ListTracker(bad=frozenset({"memory/host/rss_mib"}))
    for step in range(25):
        journal.append(batch(step))
    upload = uploader(run, tracker)
    upload.deliver(complete=True)
    good = [point for point in expected(range(25)) if point.name != "memory/host/rss_mib"]
    assert tracker.all_points() == good
    assert upload.state.dropped == {"rejected: memory/host/rss_mib": 25}


def test_a_client_that_always_breaks_on_something_does_not_hold_up_the_rest(
    run: RunDirectory,
) -> None:
    journal, tracker = writer(run), ListTracker(crash_after=0)
    journal.append(batch(0))
    upload = uploader(run, tracker)
    for _ in range(5):
        with pytest.raises(TrackerUnavailableError):
            upload.deliver(complete=True)
    upload.deliver(complete=True)
    assert sum(upload.state.dropped.values()) == 2


def test_events_wait_until_there_is_a_run_for_them(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker()
    journal.append(batch(0))
    upload = uploader(run, tracker, own=False)
    assert upload.deliver() == 0
    assert not tracker.opened
    journal.bind("list", Binding("users"))
    journal.append(batch(1))
    upload.note_run(TrackerRun("users", "memory://full:secret@address"))
    upload.deliver(complete=True)
    assert tracker.points == {"users": expected(range(2))}
    joined = tracker.opened[0].joined
    assert joined is not None
    assert joined.uri == "memory://full:secret@address"


def test_a_run_of_its_own_keeps_what_came_before_the_users(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker()
    journal.append(batch(0))
    upload = uploader(run, tracker)
    upload.deliver()
    journal.bind("list", Binding("users"))
    journal.append(batch(1))
    upload.deliver(complete=True)
    assert tracker.points == {f"own-{run.id}": expected(range(1)), "users": expected(range(1, 2))}


def test_an_end_that_the_tracker_knows_is_not_made_worse(run: RunDirectory) -> None:
    """A journal on a full disk may lack the end. The helper process knows the end from the trainer."""
    journal, tracker = writer(run), ListTracker()
    journal.append(batch(0))
    bury(run)
    upload = uploader(run, tracker)
    upload.end = End(50, "finished")
    upload.deliver(complete=True)
    upload.close()
    explain_afterwards(run)  # as `memlog sync` does
    assert [entry.event for file in run.files() for entry in file.read()] == [batch(0)]
    with late_events(run, Diagnostics()) as bus:  # something else is delivered later
        bus.publish(Artifact(60, "report", "report.html", "artifacts/report.html", 1))
    later = uploader(run, tracker)
    later.deliver(complete=True)
    later.close()
    assert tracker.ended == {f"own-{run.id}": "finished"}
    assert tracker.ended_us == {f"own-{run.id}": 50}


def test_a_process_that_is_gone_without_its_end_was_killed(run: RunDirectory) -> None:
    journal, tracker = writer(run), ListTracker()
    journal.append(batch(0))
    bury(run)
    uploader(run, tracker).deliver(complete=True)
    uploader(run, tracker).close()  # another uploader: the first died before it could end the run
    assert tracker.ended == {f"own-{run.id}": "killed"}


def test_two_uploaders_of_one_backend_never_run_at_once(run: RunDirectory) -> None:
    with UploadLock(run, "list"):
        with pytest.raises(DeliveryError, match="own helper process"), UploadLock(run, "list"):
            pass
        with UploadLock(run, "other"):
            pass
    with UploadLock(run, "list"):
        pass


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["step", "jump", "deliver", "fail", "restart"]), max_size=40))
def test_whatever_happens_every_point_arrives_once(moves: list[str]) -> None:
    """Any order of steps, deliveries, failures and new uploaders gives the plan's points, once each."""
    with tempfile.TemporaryDirectory() as directory:
        run = new_run(Path(directory))
        journal, tracker = writer(run), ListTracker()
        upload = uploader(run, tracker)
        step, events = 0, []
        for move in moves:
            if move in ("step", "jump"):
                step += 1 if move == "step" else 9_997
                events.append(batch(step))
                journal.append(events[-1])
            elif move == "restart":
                upload = uploader(run, tracker)
            else:
                tracker.down = move == "fail"
                with contextlib.suppress(TrackerUnavailableError):
                    upload.deliver()
        tracker.down = False
        upload.deliver(complete=True)
        journal.close()
        plan: Plan[int] = Plan("bucketed")
        wanted = [point for at, event in enumerate(events) for point in plan.feed(event, at)]
        assert tracker.all_points() == wanted + plan.flush()


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(["step", "run", "number", "deliver", "fail", "refuse", "restart"]),
        max_size=40,
    )
)
@example(["step", "run", "step"])
def test_each_run_has_its_own_steps_whatever_happens(moves: list[str]) -> None:
    """Each run gets its own points once, in any order of runs, step numbers, failures and refusals."""
    with tempfile.TemporaryDirectory() as directory:
        run = new_run(Path(directory))
        journal, tracker = writer(run), ListTracker()
        upload = uploader(run, tracker, own=False)
        bound, wanted, step = Binding("run-0"), {}, 0
        journal.bind("list", bound)
        for move in moves:
            if move == "step":
                journal.append(batch(step))
                plan: Plan[int] = Plan("bucketed", offset=bound.offset)
                points = [*plan.feed(batch(step), 0), *plan.flush()]
                wanted.setdefault(bound.run_id, []).extend(points)
                step += 1
            elif move == "run":
                bound = Binding(f"run-{step}", offset=step)
                journal.bind("list", bound)
            elif move == "number" and bound.run_id not in wanted:
                # A trainer's first number: the same run is bound again, with another offset.
                bound = Binding(bound.run_id, offset=step - 7)
                journal.bind("list", bound)
            elif move == "restart":
                upload = uploader(run, tracker, own=False)
            elif move in ("deliver", "fail", "refuse"):
                tracker.down = move == "fail"
                tracker.deleted = {bound.run_id} if move == "refuse" else set()
                with contextlib.suppress(TrackerUnavailableError, RunRefusedError):
                    upload.deliver()
        tracker.down, tracker.deleted = False, set()
        uploader(run, tracker, own=False).deliver(complete=True)
        journal.close()
        assert {name: points for name, points in tracker.points.items() if points} == wanted
