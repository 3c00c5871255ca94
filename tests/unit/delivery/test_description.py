"""The description of a run's end: the time of sending, and behaviour when a tracker fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.journals import GIB, MadeRun, at, batch
from support.sinks import ListSink, ListTracker

from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import End
from memlog.journal import RunDirectory
from memlog.reports.description import description
from memlog.sink import Target


class DescribingTracker(ListTracker):
    """Sink that keeps texts, or raises an error if the test has set one."""

    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def open_sink(self, target: Target) -> ListSink:
        sink = ListSink(self, target)
        sink.wants_description = lambda: True  # type: ignore[attr-defined] # makes it a `DescribingSink`
        sink.log_description = self._show  # type: ignore[attr-defined]
        return sink

    def _show(self, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.texts.append(text)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(3)))
    return made.write(End(at(3), "failed")).closed()


def uploader(run: RunDirectory, tracker: ListTracker) -> Uploader:
    made = Uploader(run, "list", tracker.open_sink, may_open_own=True)
    made.deliver(complete=True)
    return made


def test_it_is_sent_before_the_run_ends(run: RunDirectory) -> None:
    tracker = DescribingTracker()
    uploader(run, tracker).close()
    assert tracker.texts == [description(run, "list", f"own-{run.id}")]
    assert tracker.ended == {f"own-{run.id}": "failed"}


def test_a_live_run_has_none(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True).write(batch(0, GIB))
    tracker = DescribingTracker()
    uploader(made.closed(), tracker).close()
    assert tracker.texts == []


@pytest.mark.parametrize("error", [TrackerRejectedError("too long"), RuntimeError("a bug")])
def test_a_run_ends_without_one_if_it_is_refused(run: RunDirectory, error: Exception) -> None:
    tracker = DescribingTracker()
    tracker.error = error
    uploader(run, tracker).close()
    assert tracker.ended == {f"own-{run.id}": "failed"}


def test_after_an_outage_it_is_sent_again(run: RunDirectory) -> None:
    tracker = DescribingTracker()
    tracker.error = TrackerUnavailableError("down")
    first = uploader(run, tracker)
    with pytest.raises(TrackerUnavailableError):
        first.close()
    assert tracker.ended == {}
    tracker.error = None
    first.close()
    assert len(tracker.texts) == 1
    assert tracker.ended == {f"own-{run.id}": "failed"}
