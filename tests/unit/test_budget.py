"""What tracing may cost."""

import pytest

from memlog.tracer.budget import SPACING, Budget


def settled(share: float = 0.01, *, step: float = 1.0) -> Budget:
    """One that knows what a plain step takes."""
    budget = Budget(share, now=0)
    for _ in range(SPACING):
        budget.plain_step(step)
    return budget


def test_nothing_was_traced_yet() -> None:
    assert Budget(0.01, now=0).allows_another(now=0)


def test_a_traced_step_costs_what_it_took_beyond_a_plain_one() -> None:
    budget = settled()
    budget.traced_step(1.5, between=0.1)
    assert budget.spent() == pytest.approx(0.6)
    for _ in range(SPACING):
        budget.plain_step(1.0)
    # One more as dear: 1.2 s of 199 s are over six tenths of 1 %, of 201 s they are not.
    assert not budget.allows_another(now=199)
    assert budget.allows_another(now=201)


def test_a_first_step_counts_whole_until_a_plain_one_is_known() -> None:
    budget = Budget(0.5, now=0)
    budget.traced_step(3.0, between=0.0)
    assert budget.spent() == 3.0
    budget.plain_step(2.5)
    assert budget.spent() == 0.5


def test_one_slow_step_does_not_buy_tracing() -> None:
    budget = Budget(0.01, now=0)
    for seconds in (0.1, 0.1, 9.0, 0.1):
        budget.plain_step(seconds)
    budget.traced_step(0.5, between=0.0)
    assert budget.spent() == pytest.approx(0.4)


def test_nor_does_a_machine_that_becomes_slower() -> None:
    budget = settled(share=1.0, step=0.1)
    budget.traced_step(0.1, between=0.0)  # by the clock tracing was free
    assert budget.spent() > 0
    for _ in range(SPACING - 1):
        budget.plain_step(10.0)
        assert not budget.allows_another(now=1e9)
    budget.plain_step(10.0)
    assert budget.allows_another(now=1e9)


@pytest.mark.seed(215, 225, 247)
def test_it_holds_over_a_long_run() -> None:
    budget, now, traced = Budget(0.01, now=0), 0.0, 0
    for step in range(20_000):
        if step == 0 or budget.allows_another(now):
            budget.traced_step(0.020, between=0.010)
            now, traced = now + 0.030, traced + 1
        else:
            budget.plain_step(0.005)
            now += 0.005
    assert traced > 10
    assert budget.spent() <= 0.01 * now
