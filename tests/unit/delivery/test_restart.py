"""The run that memlog opened goes on in the attempt after a restart."""

from pathlib import Path

import pytest
from support.journals import GIB, MadeRun, at, batch
from support.sinks import ListTracker

from memlog._internal.processes import RankPosition
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerUnavailableError
from memlog.events import Alert, End, Status
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.ranks.registration import attempt_before, register


def attempt(root: Path, restart: int, status: Status) -> RunDirectory:
    made, position = MadeRun(root, f"attempt{restart}"), RankPosition(0, 2, "a", restart=restart)
    begun = at(100 * restart)
    register(made.directory, position, begun, attempt_before(made.directory, position, begun))
    made.write(
        *(batch(step, GIB) for step in range(5)),
        Alert(at(1), 4, "warning", "a rule", f"alert of attempt {restart}", "", 1.0),
        End(begun + 1_000_000, status),
    )
    return made.closed()


def test_the_new_attempt_takes_the_run_over_once_the_old_one_is_delivered(tmp_path: Path) -> None:
    tracker = ListTracker()

    def deliver(run: RunDirectory) -> None:
        uploader = Uploader(run, "list", tracker.open_sink, may_open_own=True)
        uploader.deliver(complete=True)
        uploader.close()

    first, second = attempt(tmp_path, 0, "failed"), attempt(tmp_path, 1, "finished")
    with HelperLock(first) as is_free:
        assert is_free
        deliver(first)
        with pytest.raises(TrackerUnavailableError, match="attempt before the restart"):
            deliver(second)
    assert tracker.ended == {"own-attempt0": "failed"}
    for _ in range(2):
        deliver(second)
    deliver(
        first
    )  # as `memlog sync` does later: it neither ends the run again nor sends anything twice
    assert tracker.ended["own-attempt0"] is None  # the last `close` got no end
    steps = [p.index for p in tracker.points["own-attempt0"] if p.name == "memory/host/rss_mib"]
    assert steps == list(range(10))
    titles = [alert.title for alert in tracker.alerts["own-attempt0"]]
    assert titles == ["alert of attempt 0", "alert of attempt 1"]
    assert [alert.step for alert in tracker.alerts["own-attempt0"]] == [4, 9]
