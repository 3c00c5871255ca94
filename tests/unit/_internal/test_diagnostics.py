"""Counting errors never raises an error, even if streams, log handlers or signal handlers raise one."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from support import child

from memlog._internal import terminal
from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.events import Batch


class Raising(logging.Handler):
    """A user's own handler of log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


class Unable(Exception):  # noqa: N818 - a user's own name for it
    def __repr__(self) -> str:
        raise ValueError("not even this")


class TimeUp(Exception):  # noqa: N818 - a user's own name for it
    pass


@pytest.fixture
def raising() -> Iterator[None]:
    handler = Raising()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


@pytest.mark.usefixtures("raising")
def test_a_log_handler_that_raises_is_counted_and_keeps_an_event_from_nobody() -> None:
    health, seen = Diagnostics(), []
    bus = EventBus(health)
    bus.subscribe(lambda _: 1 / 0)
    bus.subscribe(seen.append)
    bus.publish(Batch(1, 1, 1, 1, "exact"))
    health.drop("a reason", "a message", count=3)
    assert len(seen) == 1
    assert health.dropped == {"a reason": 3}
    assert health.faults == {"a subscriber to Batch: ZeroDivisionError": 1, "logging a warning": 2}


def test_an_error_whose_repr_raises_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    health = Diagnostics()
    with health.contained("a part"):
        raise Unable
    assert health.faults == {"a part: Unable": 1}
    assert "a part failed (Unable)" in caplog.text


class Interrupted(logging.Handler):
    def emit(self, _record: logging.LogRecord) -> None:
        signal.raise_signal(signal.SIGUSR1)


class InterruptedStream:
    encoding = "utf-8"

    def write(self, _text: str) -> None:
        signal.raise_signal(signal.SIGUSR1)


def end_of_time(_number: int, _frame: FrameType | None) -> None:
    raise TimeUp


@pytest.fixture
def time_is_up() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, end_of_time)
    handler = Interrupted()
    logging.getLogger("memlog").addHandler(handler)
    yield
    logging.getLogger("memlog").removeHandler(handler)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("time_is_up")
def test_a_signal_handlers_exception_passes_through_logging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    health, seen = Diagnostics(), []
    bus = EventBus(health)
    bus.subscribe(lambda _: 1 / 0)
    bus.subscribe(seen.append)
    with pytest.raises(TimeUp):
        bus.publish(Batch(1, 1, 1, 1, "exact"))
    assert len(seen) == 1  # all have had it all the same
    monkeypatch.setattr(sys, "stderr", InterruptedStream())
    with pytest.raises(TimeUp):
        terminal.say("a line")


COUNTING = """
    import logging
    import signal
    import sys

    from memlog._internal.diagnostics import Diagnostics

    logging.disable()
    health, handled = Diagnostics(), 0

    def count(*_):
        global handled
        handled += 1
        health.drop("an event", "the handler's")

    signal.signal(signal.SIGUSR1, count)

    def interrupting(at):
        # At each line and call of Diagnostics.drop: between lines, and in calls, is when Python runs
        # handlers.
        left = at
        def trace(frame, event, _):
            nonlocal left
            if frame.f_globals.get("__name__") not in ("memlog._internal.diagnostics", "collections"):
                return None
            left -= event in ("line", "call")
            if left == 0:
                left = -1
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
            return trace
        return trace

    for at in range(1, 200):
        health = Diagnostics()
        handled = 0
        for _ in range(2):
            sys.settrace(interrupting(at))
            health.drop("an event", "the program's")
            sys.settrace(None)
        assert health.dropped == {"an event": 2 + handled}, (at, health.dropped)
        if not handled:
            break
    print(at)
"""


def test_a_signal_handler_may_count_at_any_moment(tmp_path: Path) -> None:
    assert int(child.run(COUNTING, tmp_path, timeout=60)) > 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_of_fork_can_count_whatever_the_parents_threads_held() -> None:
    health, held, done = Diagnostics(), threading.Event(), threading.Event()

    def hold() -> None:
        with health._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        health.count_fault("the child's")
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
