"""Steps of threads that train at the same time: each optimizer's thread has its own count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from memlog.autolog import optimizer_steps
from memlog.autolog.optimizer_steps import Autolog


class Thread:
    """A thread that makes steps when it is told to."""

    def __init__(self) -> None:
        self._wanted, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._optimizers = [self._new()]

    @staticmethod
    def _new() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._work is None:
                return
            self._work()
            self._done.release()

    def step(self, count: int = 1) -> None:
        def work() -> None:
            for _ in range(count):
                for optimizer in self._optimizers:
                    optimizer.step()

        self._work = work
        self._wanted.release()
        assert self._done.acquire(timeout=60)

    def with_two_optimizers(self) -> Thread:
        self._optimizers.append(self._new())
        return self

    def forget(self) -> None:
        """Delete the optimizers. The thread goes on."""
        self._optimizers = [self._new()]

    def end(self) -> None:
        self._work = None
        self._wanted.release()
        self._thread.join(60)


class Counter:
    def __init__(self) -> None:
        self.counted = self.beside = 0
        self._autolog = Autolog(self._count)
        self._autolog.threads.on_other_step = self._count_other
        self.close = self._autolog.remove

    def _count(self, _: object) -> None:
        self.counted += 1

    def _count_other(self) -> None:
        self.beside += 1


@pytest.fixture
def counter() -> Iterator[Counter]:
    counter = Counter()
    yield counter
    counter.close()


def test_threads_that_take_turns_count_once(counter: Counter) -> None:
    threads = [Thread().with_two_optimizers() for _ in range(4)]
    for _ in range(30):
        for thread in threads:
            thread.step()
    assert counter.counted == 30
    for thread in threads:
        thread.end()


@pytest.mark.parametrize("how", ["end", "forget"])
def test_a_thread_that_goes_on_alone_takes_the_lead_where_the_other_was(
    counter: Counter, how: str
) -> None:
    first, second = Thread(), Thread()
    for _ in range(40):
        first.step()
        second.step()
    getattr(first, how)()
    second.step(20)
    assert (counter.counted, counter.beside) == (60, 40)


def test_the_fastest_thread_leads(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "INACTIVE_SECONDS", 0.0)
    slow, fast = Thread(), Thread()
    for _ in range(30):
        slow.step()
        fast.step(10)
    assert counter.counted >= 295
    fast.end()
    slow.step(30)
    assert 295 <= counter.counted <= 300
    slow.end()


def test_a_thread_far_behind_repeats_no_steps(counter: Counter) -> None:
    first, second = Thread(), Thread()
    first.step(5)
    second.step()
    first.step(95)
    first.end()
    second.step(99)
    assert counter.counted == 100
    second.step(20)
    assert counter.counted == 120


def test_the_main_thread_leads_also_if_another_one_stepped_first(counter: Counter) -> None:
    helper = Thread()
    helper.step(2)
    main = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(25):
        main.step()
        main.step()
        helper.step()
    helper.end()
    assert 50 <= counter.counted <= 52


def test_the_main_thread_keeps_the_lead_while_it_evaluates(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_steps, "INACTIVE_SECONDS", 0.0)
    helper, main = Thread(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    main.step()
    helper.step()
    for _ in range(9):
        main.step()
        helper.step(50)
    helper.end()
    assert counter.counted == 10


def test_threads_one_after_the_other_count_all_steps(counter: Counter) -> None:
    for _ in range(3):
        thread = Thread()
        thread.step(7)
        thread.end()
    assert counter.counted == 21


def test_a_thread_that_waits_while_another_trains_loses_the_lead(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_steps, "INACTIVE_SECONDS", 0.0)
    first, second = Thread(), Thread()
    first.step(50)
    second.step(30)
    assert counter.counted == 50 + 30 - 9
    first.step(5)
    second.step(30)
    assert counter.counted == 50 + 60 - 9


def test_threads_that_run_freely_make_the_steps_of_one(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have made their first step before one makes its second."""
    monkeypatch.setattr(optimizer_steps, "INACTIVE_SECONDS", 1000.0)
    begun = threading.Barrier(4)

    def train() -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.step()
        begun.wait(60)
        for _ in range(299):
            optimizer.step()

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.counted == 300
