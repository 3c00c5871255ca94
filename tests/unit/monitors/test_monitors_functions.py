"""Functions of every kind under ``monitor_memory`` and ``watch_loss``: the body is watched, not the call."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

import pytest

import memlog
from memlog.errors import ConfigurationError
from memlog.events import Evaluation, Scope
from memlog.monitors import _publishing


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, nothing_goes_wrong_inside: None) -> list[Any]:
    events: list[Any] = []

    class Session:
        enabled = announced = True
        health = _publishing.HEALTH
        publish = events.append

        def next_evaluation(self) -> int:
            return len(events)

    monkeypatch.setattr("memlog._internal.current_session._publisher", Session())
    return events


def test_a_generator_is_watched_until_it_is_exhausted(published: list[Any]) -> None:
    @memlog.monitor_memory("batches", verbose=False)
    def batches() -> Generator[int, str, str]:
        got = yield 1
        assert got == "sent"
        yield 2
        return "returned"

    assert inspect.isgeneratorfunction(batches)
    running = batches()
    assert published == []
    assert next(running) == 1
    assert published == []
    assert running.send("sent") == 2
    with pytest.raises(StopIteration, match="returned"):
        next(running)
    [event] = published
    assert isinstance(event, Scope)
    assert (event.label, event.error) == ("batches", None)


@pytest.mark.parametrize("error", [None, "ValueError"])
def test_a_generator_that_is_closed_or_fails_is_over(
    published: list[Any], error: str | None
) -> None:
    @memlog.monitor_memory(verbose=False)
    def batches() -> Iterator[int]:
        while True:
            yield 1

    running = batches()
    next(running)
    assert published == []
    if error is None:
        running.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(ValueError, match="x"):
            running.throw(ValueError("x"))  # type: ignore[attr-defined]
    assert [event.error for event in published] == [error]


def test_an_async_generator_is_watched_until_it_is_exhausted(published: list[Any]) -> None:
    closed: list[str] = []

    @memlog.monitor_memory(verbose=False)
    async def batches() -> AsyncGenerator[int, str]:
        try:
            got = yield 1
            assert got == "sent"
            try:
                yield 2
            except ValueError:
                yield 3
            yield 4
        finally:
            closed.append("closed")

    async def to_the_end() -> None:
        running = batches()
        assert await anext(running) == 1
        assert await running.asend("sent") == 2
        assert await running.athrow(ValueError()) == 3
        assert published == []
        assert [item async for item in running] == [4]

    async def closed_early() -> None:
        running = batches()
        assert await anext(running) == 1
        await running.aclose()

    assert inspect.isasyncgenfunction(batches)
    asyncio.run(to_the_end())
    assert (len(published), closed) == (1, ["closed"])
    asyncio.run(closed_early())
    assert ([event.error for event in published], closed) == ([None, None], ["closed"] * 2)


class Awaited:
    async def __call__(self) -> float:
        await asyncio.sleep(0)
        return 0.5


def test_an_object_that_is_awaited_is_watched_to_its_end(published: list[Any]) -> None:
    watched = memlog.monitor_memory("x", verbose=False)(Awaited())
    running = watched()
    assert published == []
    assert asyncio.run(running) == 0.5
    assert [type(event) for event in published] == [Scope]


def test_an_async_losss_value_is_known(published: list[Any]) -> None:
    @memlog.watch_loss(verbose_evaluations=0)
    async def loss(fail: bool = False) -> float:
        await asyncio.sleep(0)
        if fail:
            raise ValueError("no")
        return 0.25

    running = loss()
    assert published == []
    assert asyncio.run(running) == 0.25
    assert asyncio.run(memlog.watch_loss(Awaited(), verbose_evaluations=0)()) == 0.5
    with pytest.raises(ValueError, match="no"):
        asyncio.run(loss(fail=True))
    assert inspect.iscoroutinefunction(loss)
    evaluations = [(e.value, e.error) for e in published if isinstance(e, Evaluation)]
    assert evaluations == [(0.25, None), (0.5, None), (None, "ValueError")]


class Methods:
    @memlog.monitor_memory("a", verbose=False)
    @classmethod
    def above(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @classmethod
    @memlog.monitor_memory(verbose=False)
    def below(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @memlog.monitor_memory
    @staticmethod
    def static(x: int) -> int:
        return x


def test_class_and_static_methods_in_either_order(published: list[Any]) -> None:
    assert Methods.above(1) == Methods().below(1) == ("Methods", 1)
    assert Methods.static(2) == Methods().static(2) == 2
    assert [event.label for event in published] == ["a", "below", "static", "static"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: memlog.watch_loss(3),  # type: ignore[call-overload]
        lambda: memlog.watch_loss()("x"),
        lambda: memlog.watch_loss(classmethod(print)),  # type: ignore[arg-type]
        lambda: memlog.monitor_memory(3),  # type: ignore[call-overload]
        lambda: memlog.monitor_memory("x")(3),
        lambda: memlog.monitor_memory(property()),
    ],
)
def test_what_is_no_function_is_refused_at_once(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"watches functions, and .* pass a function"):
        wrong()


def test_a_callback_that_can_not_be_called_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="on_alert=5: pass a function"):
        memlog.init(on_alert=5)  # type: ignore[arg-type]
