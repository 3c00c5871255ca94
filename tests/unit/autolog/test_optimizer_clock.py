"""Choice of the optimizer whose steps count, for any order of optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from memlog.autolog.optimizer_steps import INACTIVE_AFTER, OptimizerClock

FEW = st.integers(1, INACTIVE_AFTER - 1)


class Optimizer:
    """Stand-in for an optimizer: the clock uses only its identity."""


class Clock:
    """Driver that steps optimizers and counts the steps that the clock counts."""

    def __init__(self) -> None:
        self.counted = 0
        self._clock = OptimizerClock(self._count)

    def _count(self, _optimizer: object) -> None:
        self.counted += 1

    def step(self, *optimizers: Optimizer) -> int:
        """Step optimizers one after the other. Return the number of steps counted so far."""
        for optimizer in optimizers:
            with self.working(optimizer):
                pass
        return self.counted

    @contextlib.contextmanager
    def working(self, optimizer: Optimizer) -> Iterator[None]:
        self._clock.begin(optimizer)
        yield
        self._clock.end(optimizer)

    def fails(self, optimizer: Optimizer) -> None:
        self._clock.begin(optimizer)

    def backward(self, number: int, *optimizers: Optimizer) -> int:
        """Step all optimizers within one backward pass."""
        self._clock.backward = lambda: number
        self.step(*optimizers)
        self._clock.backward = lambda: -1
        return self.counted


def optimizers(count: int) -> list[Optimizer]:
    return [Optimizer() for _ in range(count)]


def test_a_new_optimizer_every_ten_steps_with_the_old_ones_kept() -> None:
    clock, kept = Clock(), optimizers(24)
    for optimizer in kept:
        clock.step(*[optimizer] * 10)
    assert clock.counted == 240


@given(st.lists(st.integers(2, 30), min_size=1, max_size=8))
def test_a_replacement_counts_from_its_first_step(phases: list[int]) -> None:
    clock, kept, made = Clock(), optimizers(len(phases)), 0
    for optimizer, steps in zip(kept, phases, strict=True):
        for _ in range(steps):
            made += 1
            assert clock.step(optimizer) == made


@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), FEW)
def test_no_step_is_lost_when_a_pair_replaces_a_pair(phases: list[int], of_the_second: int) -> None:
    """Each fold has new networks and new optimizers. The generator's steps must still count."""
    clock, kept, made = Clock(), [], 0
    for rounds in phases:
        first, second = optimizers(2)
        kept += [first, second]
        for _ in range(rounds):
            made += 1
            assert clock.step(first, *[second] * of_the_second) == made


@given(FEW, FEW, st.integers(3, 12))
def test_of_two_that_alternate_one_counts(first: int, second: int, rounds: int) -> None:
    """The critic may step five times for each step of the actor, or the other way round."""
    one, other = optimizers(2)
    clock = Clock()
    for done in range(1, rounds + 1):
        clock.step(*[one] * first)
        counted = clock.step(*[other] * second)
        # What was counted of the other while nobody knew better is made up for by the first's next steps.
        made_up = first * (done - 1) > second
        assert first * done <= counted <= first * done + (0 if made_up else second)
    clock.step(*[one] * first * INACTIVE_AFTER)
    assert clock.counted == first * (rounds + INACTIVE_AFTER)


@given(st.integers(2, 5), st.integers(1, 20), st.integers(2, 30))
def test_an_optimizer_that_stepped_alone_can_alternate_later(
    count: int, alone: int, rounds: int
) -> None:
    """A generator is trained for a while before the other networks join."""
    first, *others = optimizers(count)
    clock = Clock()
    clock.step(*[first] * alone)
    for _ in range(rounds):
        clock.step(*others, first)
    assert clock.counted == alone + rounds


@given(st.lists(st.tuples(st.booleans(), st.integers(2, 12)), min_size=1, max_size=6))
def test_an_optimizer_in_another_counts_once(phases: Iterable[tuple[bool, int]]) -> None:
    """Each optimizer is new, and older ones stay alive. Some step inside a wrapper (Lookahead)."""
    clock, made, kept = Clock(), 0, []
    for wrapped, steps in phases:
        inner, outer = optimizers(2)
        kept += [inner, outer]
        for _ in range(steps):
            made += 1
            if wrapped:
                with clock.working(outer):
                    clock.step(inner)
            else:
                clock.step(inner)
            assert clock.counted == made


def test_one_that_is_wrapped_in_mid_run_goes_on_counting_once() -> None:
    clock, (inner, outer) = Clock(), optimizers(2)
    clock.step(*[inner] * 5)
    for made in range(6, 30):
        with clock.working(outer):
            clock.step(inner)
        assert clock.counted == made


def test_a_wrapper_that_failed_does_not_hide_what_it_wraps() -> None:
    clock, (inner, outer) = Clock(), optimizers(2)
    for _ in range(3):
        with clock.working(outer):
            clock.step(inner)
    clock.fails(outer)
    clock.step(*[inner] * (INACTIVE_AFTER + 5))
    assert clock.counted == 3 + 5


@given(st.lists(st.integers(0, 3), max_size=200))
def test_a_step_counts_once_at_most(order: list[int]) -> None:
    clock, known = Clock(), optimizers(4)
    for made, number in enumerate(order, 1):
        before = clock.counted
        assert before <= clock.step(known[number]) <= min(before + 1, made)


@given(st.integers(1, 80), st.randoms(use_true_random=False))
def test_optimizers_that_step_in_one_backward_pass_are_one_step(count: int, order: Random) -> None:
    """PyTorch's own tutorial uses an optimizer for each parameter to save memory of gradients."""
    clock, kept = Clock(), optimizers(count)
    for number in range(30):
        if count <= 30:  # up to this number, the clock knows which optimizers alternate
            order.shuffle(kept)
        assert clock.backward(number, *kept) == number + 1


def test_a_second_backward_pass_of_others_alternates_with_the_first() -> None:
    clock, judge, maker = Clock(), optimizers(20), optimizers(40)
    for number in range(30):
        clock.backward(2 * number, *judge)
        assert clock.backward(2 * number + 1, *maker) == number + 1
