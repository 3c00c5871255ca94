"""The upload thread, which tries again until everything is delivered."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.journals import GIB, MadeRun, at, batch
from support.sinks import ListTracker

from memlog.delivery.uploader.retrying_worker import INTERVAL, MAX_BACKOFF, UploadWorker
from memlog.delivery.uploader.uploader import Uploader
from memlog.events import End
from memlog.journal.delivery_state import TakenOver, UploadLock


@pytest.fixture
def tracker() -> ListTracker:
    return ListTracker(down=True)


@pytest.fixture
def thread(tmp_path: Path, tracker: ListTracker) -> UploadWorker:
    run = MadeRun(tmp_path).write(batch(0, GIB), End(at(1), "finished")).closed()
    return UploadWorker(Uploader(run, "list", tracker.open_sink, may_open_own=True))


def run_with(
    thread: UploadWorker, monkeypatch: pytest.MonkeyPatch, at_pause: dict[int, Callable[[], object]]
) -> list[float]:
    """Run an upload thread's loop without waiting, and return the seconds of the pauses that it asks for."""
    pauses: list[float] = []

    def wait(timeout: float) -> bool:
        pauses.append(timeout)
        at_pause.get(len(pauses), lambda: None)()
        return False

    with monkeypatch.context() as patch:
        patch.setattr(thread._wake, "wait", wait)
        thread._run()
    return pauses


@pytest.mark.slow
def test_a_tracker_that_is_away_for_hours_gets_everything(
    thread: UploadWorker, tracker: ListTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = {1200: lambda: setattr(tracker, "down", False)}  # after five hours
    thread.complete()
    pauses = run_with(thread, monkeypatch, back)
    assert (thread.delivered, len(pauses)) == (True, 1200)
    assert tracker.all_points()
    assert max(pauses) == MAX_BACKOFF


def test_at_the_end_of_a_run_it_tries_again_soon(
    thread: UploadWorker, tracker: ListTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread can be in its longest pause when the user begins to wait for the end."""
    at_pause = {10: thread.complete, 13: lambda: setattr(tracker, "down", False)}
    pauses = run_with(thread, monkeypatch, at_pause)
    assert thread.delivered
    assert pauses[9] == MAX_BACKOFF
    assert pauses[10:] == [2 * INTERVAL, 4 * INTERVAL, 8 * INTERVAL]


def test_a_waiting_helper_makes_way_after_the_run(thread: UploadWorker) -> None:
    thread.start()
    deadline = time.monotonic() + 30
    while not thread.uploader.state.failed_attempts:  # it holds the lock, then
        assert time.monotonic() < deadline
        time.sleep(0.01)
    taken = threading.Event()

    def sync() -> None:
        with TakenOver(thread.uploader.run, "list", 30):
            taken.set()

    syncing = threading.Thread(target=sync)
    syncing.start()
    for _ in range(20):
        thread.stop_if_wanted()
        assert not taken.wait(0.02)  # the journal is not complete
    thread.complete()
    while not taken.wait(0.05):
        thread.stop_if_wanted()
    syncing.join()
    assert thread.join(30)
    assert not thread.delivered


def test_a_thread_that_could_not_deliver_does_not_say_that_it_did(thread: UploadWorker) -> None:
    with UploadLock(thread.uploader.run, "list"):
        thread.start()
        thread.complete()
        assert thread.join(30)
    assert not thread.delivered
