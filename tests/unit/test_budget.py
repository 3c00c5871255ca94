"""What tracing may cost."""

from memlog.tracer.budget import Budget


def test_nothing_was_traced_yet() -> None:
    assert Budget(0.01, now=0).allows_another(now=0)


def test_a_traced_step_costs_what_it_took_beyond_a_plain_one() -> None:
    budget = Budget(0.01, now=0)
    for _ in range(5):
        budget.plain_step(1.0)
    budget.traced_step(1.5, between=0.1)
    assert budget.spent() == 0.6
    # One more as dear: 1.2 s of 100 s are not 1 %, of 120 s they are.
    assert not budget.allows_another(now=119)
    assert budget.allows_another(now=121)


def test_a_first_step_counts_whole_until_a_plain_one_is_known() -> None:
    budget = Budget(0.5, now=0)
    budget.traced_step(3.0, between=0.0)
    assert budget.spent() == 3.0
    budget.plain_step(2.5)
    assert budget.spent() == 0.5
    assert not budget.allows_another(now=6.5)
    assert budget.allows_another(now=7.5)


def test_one_slow_step_does_not_buy_tracing() -> None:
    budget = Budget(0.01, now=0)
    for seconds in (0.1, 0.1, 9.0, 0.1):
        budget.plain_step(seconds)
    budget.traced_step(0.5, between=0.0)
    assert abs(budget.spent() - 0.4) < 1e-9


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
