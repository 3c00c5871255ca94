"""Time that tracing may cost."""

import pytest

from memlog.tracer.schedule.budget import SPACING, Budget


def settled(share: float = 0.01, *, step: float = 1.0) -> Budget:
    """Return a budget that is set up and has the time of an untraced step."""
    budget = begun(share)
    plain_steps(budget, seconds=step)
    return budget


def begun(share: float = 0.01) -> Budget:
    budget = Budget(share)
    budget.begin(0)
    return budget


def plain_steps(budget: Budget, count: int = SPACING, seconds: float = 1.0) -> None:
    for _ in range(count):
        budget.plain_step(seconds)


def test_a_traced_step_costs_what_it_took_beyond_a_plain_one() -> None:
    budget = settled()
    budget.traced_step(1.5, between=0.1)
    assert budget.spent == pytest.approx(0.6)
    plain_steps(budget)
    # One more as dear: 1.2 s of 199 s are over six tenths of 1 %, of 201 s they are not.
    assert not budget.allows_another(now=199)
    assert budget.allows_another(now=201)


def test_steps_traced_together_cost_their_time_above_that_of_plain_steps() -> None:
    budget = settled()
    budget.traced_step(5.5, between=0.1, steps=5)
    assert budget.spent == pytest.approx(0.6)


def test_what_is_done_once_stands_apart() -> None:
    budget = begun()
    budget.traced_step(3.0, between=0.5, setting_up=True)
    budget.plain_step(1.0)
    assert budget.set_up == pytest.approx(2.5)  # the step itself would have taken 1 s of it
    budget.traced_step(1.3, between=0.1, setting_up=True)
    assert (budget.spent, budget.set_up) == (0, pytest.approx(2.9))
    plain_steps(budget)
    # The second tells what one more costs: 0.4 s are six tenths of 1 % of 67 s.
    assert not budget.allows_another(now=66)
    assert budget.allows_another(now=67)


def test_one_slow_step_does_not_buy_tracing() -> None:
    budget = begun()
    for seconds in (0.1, 0.1, 9.0, 0.1):
        budget.plain_step(seconds)
    budget.traced_step(0.5, between=0.0)
    assert budget.spent == pytest.approx(0.4)


def test_a_slower_machine_does_not_buy_tracing() -> None:
    budget = settled(share=1.0, step=0.1)
    budget.traced_step(0.1, between=0.0)  # by the clock tracing was free
    assert budget.spent > 0
    for _ in range(SPACING - 1):
        budget.plain_step(10.0)
        assert not budget.allows_another(now=1e9)
    budget.plain_step(10.0)
    assert budget.allows_another(now=1e9)


def test_one_dear_trace_does_not_stand_for_all_that_come() -> None:
    """The machine can have been busy for a moment during that trace."""
    budget = settled()
    budget.traced_step(11.0, between=0.0)
    for _ in range(8):
        budget.traced_step(1.1, between=0.0)
    plain_steps(budget)
    assert budget.spent == pytest.approx(10.8)
    assert not budget.allows_another(now=1810)
    assert budget.allows_another(now=1820)


def trained(
    seconds: float, cost: float, steps: int, share: float = 0.01
) -> tuple[Budget, list[int]]:
    """Simulate a run with steps of ``seconds``, and return its budget and the steps traced later."""
    budget, now, traced = begun(share), 0.0, []
    for step in range(steps):
        setting_up = step in (0, 2)
        if setting_up or budget.allows_another(now):
            budget.traced_step(seconds + cost, between=0.0, setting_up=setting_up)
            now += seconds + cost
            traced.append(step)
        else:
            budget.plain_step(seconds)
            now += seconds
    return budget, traced[2:]


@pytest.mark.parametrize(
    ("seconds", "cost", "steps"),
    [(0.005, 0.025, 20_000), (1.0, 0.4, 5_000), (1.0, 1.7, 5_000), (1.0, 3.0, 5_000)],
)
@pytest.mark.seed(215, 225, 247)
def test_it_holds_over_a_long_run(seconds: float, cost: float, steps: int) -> None:
    budget, traced = trained(seconds, cost, steps)
    assert len(traced) >= 10
    assert budget.spent <= 0.01 * seconds * steps


@pytest.mark.parametrize("dearer", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("seconds", [0.002, 0.05, 1.0])
def test_a_short_runs_second_half_is_traced_too(seconds: float, dearer: float) -> None:
    """However long it is, which nobody knows beforehand; a traced step takes 1.4 to 2.7 times as long."""
    for steps in range(60, 400):
        budget, traced = trained(seconds, dearer * seconds, steps)
        assert traced[-1] >= steps // 2
        assert budget.spent <= 0.055 * seconds * steps


def test_one_dear_trace_does_not_keep_the_next_from_a_young_run() -> None:
    budget = settled(step=0.1)
    for _ in range(4):
        budget.traced_step(0.2, between=0.0)
    budget.traced_step(0.7, between=0.0)
    plain_steps(budget, 40, seconds=0.1)
    assert not budget.allows_another(now=3.9)
    assert budget.allows_another(now=4.1)


def test_a_short_run_has_a_minutes_budget() -> None:
    seconds, cost = 0.002, 0.006
    budget, traced = trained(seconds, cost, 300)
    assert traced == [32, 64, 128, 256]
    assert 0.01 * seconds * 300 < budget.spent <= 0.6
    # A trace that costs more waits until it is a twentieth of the time so far.
    _, costly = trained(0.05, 0.7, 1000)
    assert costly[0] * 0.05 == pytest.approx(14, rel=0.1)


@pytest.mark.parametrize("steps", range(60, 400, 20))
def test_a_short_run_of_many_narrow_layers_is_traced_in_its_second_half(steps: int) -> None:
    """A traced step of 120 narrow layers takes ten plain ones."""
    _, traced = trained(0.02, 0.18, steps)
    assert traced[-1] >= steps // 2


def test_what_came_to_nothing_is_paid_for() -> None:
    budget = begun()
    budget.charge(2.0)
    plain_steps(budget, seconds=0.1)
    assert budget.spent == 2.0
    assert not budget.allows_another(now=600)  # one more attempt can fail, too
    assert budget.allows_another(now=700)


def test_what_the_run_does_not_do_any_more_is_traced_again_soon() -> None:
    budget = settled(step=0.01)
    budget.traced_step(0.014, between=0.0)
    plain_steps(budget, seconds=0.01)
    assert not budget.allows_another(now=0.4)
    assert budget.allows_another(now=0.4, outdated=True)
