"""Exceptions of a user's signal handlers reach the training loop, also from inside memlog."""

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.events import recorded

import memlog
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.signals import raised_by_handler
from memlog.events import Batch
from memlog.journal import RunDirectory
from memlog.journal.segments import MappedFile
from memlog.reports import summarize


class TimeUp(TimeoutError):  # noqa: N818 - a user's own name for it
    """A user's exception that is an ``OSError``, like the error of a failed write."""


def plain(_number: int, _frame: FrameType | None) -> None:
    raise TimeUp


def of_any_number(*_arguments: object) -> None:
    raise TimeUp


def with_options(*_arguments: object, answer: int = 42) -> None:
    raise TimeUp(answer)


def that_resets_itself(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise TimeUp


def that_deletes_its_arguments(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TimeUp


def below(_extra: str, _number: int, _frame: FrameType | None) -> None:
    of_any_number()


class Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.method(number, frame)

    def method(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeUp


HANDLERS: list[Callable[..., object]] = [
    plain,
    of_any_number,
    with_options,
    that_resets_itself,
    that_deletes_its_arguments,
    functools.partial(below, "extra"),
    Handler(),
    Handler().method,
]


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, getattr(request, "param", plain))
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupted() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("handled", HANDLERS, ids=range(len(HANDLERS)), indirect=True)
def test_every_kind_of_signal_handler_is_recognised() -> None:
    with pytest.raises(TimeUp) as caught:
        interrupted()
    assert raised_by_handler(caught.value)


def test_an_error_of_memlog_is_not_a_signal_handlers() -> None:
    def look(number: int, frame: FrameType) -> None:
        raise ValueError(number, frame)

    with pytest.raises(ValueError, match="1") as caught:
        look(1, sys._getframe().f_back or sys._getframe())
    assert not raised_by_handler(caught.value)
    assert not raised_by_handler(ValueError())


@pytest.mark.usefixtures("handled")
def test_a_signal_handler_is_recognised_if_it_interrupts_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python removes the frames of an import from tracebacks, and with them the interrupted frame."""

    class Spec(ModuleSpec):
        def __index__(self) -> int:
            return int(signal.SIGUSR1)

    class Finder:
        def find_spec(self, name: str, *_: object) -> Spec:
            return Spec(name, ExtensionFileLoader(name, "a.so"))

    monkeypatch.setattr(sys, "meta_path", [Finder()])
    monkeypatch.setattr("_imp.create_dynamic", signal.raise_signal)
    with pytest.raises(TimeUp) as caught:
        import loaded_by_nobody  # type: ignore[import-not-found]  # noqa: F401
    assert raised_by_handler(caught.value)


@pytest.mark.usefixtures("handled")
def test_a_signal_handlers_exception_passes_contained_blocks_and_callbacks() -> None:
    health = Diagnostics()
    with pytest.raises(TimeUp), health.contained("a test"):
        interrupted()
    with pytest.raises(TimeUp):
        health.contained_callback("a test", lambda _: interrupted())(None)
    assert not health.faults


def steps(session: memlog.Session) -> list[int]:
    return [event.step for event in recorded(session, Batch)]


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("written", [True, False])
def test_the_step_that_was_interrupted_is_in_the_journal_once_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    write = MappedFile.write

    def slow(file: MappedFile, *line: Any) -> Any:
        monkeypatch.undo()
        if written:
            write(file, *line)
        interrupted()

    with memlog.init("local", dir=tmp_path) as session:
        session.step()
        assert session._live is not None
        mapped = session._live._journal._output.mapped
        assert mapped is not None
        mapped.limit = 0  # else the line is stored without a call, which nothing can interrupt
        monkeypatch.setattr(MappedFile, "write", slow)
        with pytest.raises(TimeUp):
            session.step()
        session.step()
    assert session.directory is not None
    assert steps(session) == ([0, 1, 2] if written else [0, 2])
    assert not session.health.faults
    assert not session.health.dropped
    lost = summarize(RunDirectory(session.directory)).health.dropped
    assert lost == ({} if written else {"journal_lost": 1})


@pytest.mark.usefixtures("handled")
def test_a_step_that_was_interrupted_before_it_had_an_event_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memlog.init("local", dir=tmp_path) as session:
        session.step()
        assert session._live is not None
        monkeypatch.setattr(session._live.batches.host, "read", interrupted)
        with pytest.raises(TimeUp):
            session.step()
        monkeypatch.undo()
        session.step()
    assert steps(session) == [0, 2]
    assert not session.health.faults
    assert session.health.dropped == {"interrupted": 1}
