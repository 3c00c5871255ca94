"""Time that tracing may cost."""

import re

import pytest

from memlog._internal.current_session import VARIABLE, Launch
from memlog.tracer.schedule.budget import AT_START, PER_MODULE, SET_UP, SPACING, Budget, StepCosts


def begun(share: float = 0.01) -> Budget:
    budget = Budget(share)
    budget.begin(0)
    return budget


def settled(share: float = 0.01, *, step: float = 1.0) -> Budget:
    """Return a budget whose first two traces were free, and that has the time of a plain step."""
    budget = begun(share)
    for _ in range(SET_UP):
        budget.traced_step(step, own=0.0)
        plain_steps(budget, seconds=step)
    return budget


def plain_steps(budget: Budget, count: int = SPACING, seconds: float = 1.0) -> None:
    for _ in range(count):
        budget.plain_step(seconds)


def test_a_trace_costs_what_its_step_took_beyond_a_plain_one() -> None:
    budget = settled()
    budget.traced_step(1.6, own=0.2)
    assert budget.spent == pytest.approx(0.6)


def test_steps_traced_together_cost_their_time_above_that_of_plain_steps() -> None:
    budget = settled()
    budget.traced_step(5.6, own=0.2, steps=5)
    assert budget.spent == pytest.approx(0.6)


def test_a_slower_machine_does_not_buy_tracing() -> None:
    """By the clock the traced step was no slower than others, but memlog knows what its own code took."""
    budget = settled()
    budget.traced_step(0.9, own=0.3)
    assert budget.spent == pytest.approx(0.3)


def test_one_slow_step_does_not_buy_tracing() -> None:
    budget = settled(step=0.1)
    budget.plain_step(9.0)
    budget.traced_step(0.5, own=0.0)
    assert budget.spent == pytest.approx(0.4)


def test_the_first_trace_counts() -> None:
    budget = begun()
    budget.traced_step(3.0, own=0.25)  # the first step of a program is slow without tracing, too
    budget.plain_step(1.0)
    assert budget.set_up == pytest.approx(0.5)  # memlog's own code takes half of the cost
    budget.traced_step(1.1, own=0.1)
    plain_steps(budget)
    # 0.6 s so far and 0.1 s more are six tenths of 1 % of 117 s.
    assert not budget.allows_another(now=116)
    assert budget.allows_another(now=117)


def test_the_first_two_traces_together_may_cost_the_share_of_ten_seconds() -> None:
    budget = begun()
    assert budget.limit(now=0) == pytest.approx(0.4 * 0.01 * AT_START)
    budget.set_up += 0.02  # the search for the model
    budget.traced_step(1.0, own=0.02)
    assert budget.set_up == pytest.approx(0.06)
    assert not budget.allows_another(now=1)  # not the very next step
    budget.plain_step(0.1)
    assert budget.allows_another(now=2)
    assert budget.limit(now=2) == pytest.approx(0.4 * 0.04)
    budget.traced_step(0.14, own=0.03)
    plain_steps(budget)
    assert budget.set_up == pytest.approx(0.1)
    assert not budget.allows_another(now=20)
    assert budget.allows_another(now=24)  # 0.14 s are six tenths of 1 % of 23.3 s


def test_after_a_dear_first_trace_the_second_is_earned_too() -> None:
    budget = begun()
    budget.set_up += 0.02  # the search for the model
    budget.traced_step(1.0, own=0.04)
    plain_steps(budget)
    assert not budget.allows_another(now=17)
    assert budget.allows_another(now=19)


def test_a_trace_that_was_cut_is_continued_only_when_more_has_been_earned() -> None:
    budget = begun()
    budget.traced_step(2.0, own=0.05, cut=True)
    plain_steps(budget, 300)
    assert not budget.allows_another(now=29)
    assert budget.allows_another(now=31)  # 0.1 s and 0.2 s more are 1 %
    assert budget.limit(now=31) == pytest.approx(0.4 * 0.21)


def test_the_search_for_the_model_is_not_expected_again_after_a_trace_that_was_cut() -> None:
    costs = StepCosts(0.01)
    costs.step_ended(0)
    costs.searched(0.11, due=0.0)
    costs.window_opened(0)
    costs.window_closed(0.024, 0.006, cut=True)
    costs.settle()
    assert costs.budget.set_up == pytest.approx(0.11 + 0.06)
    plain_steps(costs.budget)
    assert not costs.may_trace(28, outdated=lambda: False)
    assert costs.may_trace(30, outdated=lambda: False)  # 0.17 s and twice 0.06 s are 1 % of 29 s


def test_a_search_for_the_model_that_is_due_is_earned_together_with_the_next_trace() -> None:
    costs = StepCosts(0.01)
    costs.step_ended(0)
    costs.searched(0.0, due=0.3)
    costs.window_opened(0)
    costs.window_closed(0.024, 0.006, cut=False)
    costs.settle()
    plain_steps(costs.budget)
    costs.budget.traced_step(1.06, own=0.0)
    plain_steps(costs.budget)
    assert not costs.may_trace(79, outdated=lambda: False)
    assert costs.may_trace(81, outdated=lambda: False)  # 0.12 s, 0.3 s and 0.06 s are 0.6 % of 80 s
    assert costs.budget.covers(0.6, first=9.0, now=81)
    assert not costs.budget.covers(0.7, first=0.0, now=81)


def test_a_search_leaves_the_time_for_the_first_trace_even_if_it_takes_twice_as_long() -> None:
    costs = StepCosts(0.01)
    assert costs.covers(0.04, 10, "cpu", now=0)  # 0.02 s for the trace, of 0.1 s
    assert not costs.covers(0.041, 10, "cpu", now=0)


def test_the_second_trace_does_not_wait_for_a_search_that_costs_too_much() -> None:
    costs = StepCosts(0.01)
    costs.searched(0.0, due=0.3)
    costs.window_opened(0)
    costs.window_closed(0.012, 0.006, cut=False)
    costs.settle()
    plain_steps(costs.budget, 1)
    assert costs.may_trace(1, outdated=lambda: False)
    assert not costs.budget.covers(0.3, first=0.0, now=1)


def test_after_a_cut_trace_the_next_is_expected_to_cost_what_the_model_s_size_says() -> None:
    budget = begun()
    assert not budget.expect(0.4, now=0)
    budget.traced_step(2.0, own=0.05, cut=True)
    plain_steps(budget)
    assert not budget.allows_another(now=49)
    assert budget.allows_another(now=51)


def test_a_first_trace_of_which_less_than_a_quarter_fits_waits_until_it_is_earned() -> None:
    costs = StepCosts(0.01)
    costs.searched(0.05, due=0.0)
    assert costs.waits(300, "cpu", now=0)
    assert "300 modules" in costs.untraced
    assert "budget=0.01 allows after 65 s" in costs.untraced
    assert "set budget=0.07 or more" in costs.untraced  # 0.06 would leave nothing for the search
    plain_steps(costs.budget, 1)
    assert not costs.may_trace(64, outdated=lambda: False)
    assert costs.may_trace(66, outdated=lambda: False)
    assert not costs.waits(300, "cpu", now=66)
    costs.window_opened(66)
    assert not costs.untraced


@pytest.mark.parametrize(
    ("launched", "remedy"),
    [
        (Launch(pid=1, directory="/", layers=True), "pass --budget 0.06 or more to memlog run"),
        (
            Launch(pid=1, directory="/"),
            "set budget=0.06 or more, or call session.snapshot() before it",
        ),
    ],
)
def test_a_program_without_a_session_is_told_of_the_command_s_option(
    launched: Launch, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, launched.encode())
    costs = StepCosts(0.01)
    assert costs.waits(300, "cpu", now=0)
    assert costs.untraced.endswith(f"for the first step, {remedy}")


@pytest.mark.parametrize("modules", [122, 137, 150, 349, 351, 1_000, 4_700])
def test_the_budget_that_is_named_traces_the_whole_first_step(modules: int) -> None:
    costs = StepCosts(0.001)
    costs.searched(0.003, due=0.15)
    assert costs.waits(modules, "cpu", now=0)
    [named] = re.findall(r"set budget=([\d.]+)", costs.untraced)
    advised = StepCosts(float(named))
    advised.searched(0.153, due=0.0)  # this budget covers the search, too
    assert not advised.waits(modules, "cpu", now=0)
    assert advised.budget.limit(now=0) >= 0.4 * modules * PER_MODULE["cpu"]
    assert float(named) < 2 * modules * PER_MODULE["cpu"] / AT_START + 0.02


@pytest.mark.parametrize(
    ("launched", "remedy"),
    [
        (Launch(pid=1, directory="/", layers=True), "no budget is enough for the whole first step"),
        (None, "for the first step, call session.snapshot() before it"),
    ],
)
def test_no_budget_above_the_maximum_is_named(
    launched: Launch | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched is not None:
        monkeypatch.setenv(VARIABLE, launched.encode())
    costs = StepCosts(0.01)
    assert costs.waits(5_001, "cpu", now=0)
    assert costs.untraced.endswith(f"s of training; {remedy}")


@pytest.mark.parametrize("modules", [4_700, 5_000])
def test_the_maximum_is_not_told_as_a_minimum(modules: int) -> None:
    costs = StepCosts(0.01)
    assert costs.waits(modules, "cpu", now=0)
    assert costs.untraced.endswith("set budget=1, or call session.snapshot() before it")


def test_a_model_on_an_accelerator_or_with_a_larger_budget_is_traced_at_once() -> None:
    assert not StepCosts(0.01).waits(300, "cuda", now=0)
    assert not StepCosts(0.06).waits(300, "cpu", now=0)


def test_one_dear_trace_does_not_stand_for_all_that_come() -> None:
    """The machine can have been busy for a moment during that trace."""
    budget = settled()
    budget.traced_step(11.0, own=0.0)
    for _ in range(8):
        budget.traced_step(1.1, own=0.0)
    plain_steps(budget)
    assert budget.spent == pytest.approx(10.8)
    assert not budget.allows_another(now=1810)
    assert budget.allows_another(now=1820)


def test_there_are_plain_steps_between_traces() -> None:
    budget = settled(share=1.0)
    budget.traced_step(1.0, own=0.0)
    plain_steps(budget, SPACING - 1)
    assert not budget.allows_another(now=1e9)
    budget.plain_step(1.0)
    assert budget.allows_another(now=1e9)


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("cost", [0.0005, 0.025, 0.4, 1.7, 30.0])
@pytest.mark.parametrize("step", [0.005, 0.1, 1.0])
@pytest.mark.seed(215, 225, 247)
def test_the_budget_holds_at_every_moment(step: float, cost: float, share: float) -> None:
    """All traces together cost no more than the share of the time so far, or of `AT_START`."""
    budget, now, traced = begun(share), 0.0, 0
    waits = budget.expect(cost, now)
    for number in range(20_000):
        if (number == 0 and not waits) or budget.allows_another(now):
            limit = budget.limit(now)
            # To close the window takes a quarter of the time that recording takes.
            own = 1.25 * min(0.4 * cost, limit)
            now += step + own / 0.5
            budget.traced_step(step + own / 0.5, own=own, cut=0.4 * cost > limit)
            traced += 1
        else:
            budget.plain_step(step)
            now += step
        all_costs = budget.spent + budget.set_up
        # A later trace may cost more than the one before it, but not more than is earned.
        assert all_costs <= 1.001 * share * max(now, AT_START)
        if traced > SET_UP:
            assert all_costs <= 1.001 * share * now
    if traced < SET_UP:
        assert (traced + 1) * cost > share * now
    if cost < step:
        assert budget.spent + budget.set_up >= 0.3 * min(share * now, cost * 20_000 / SPACING)


def test_what_came_to_nothing_is_paid_for() -> None:
    budget = begun()
    budget.charge(2.0)
    plain_steps(budget, seconds=0.1)
    assert not budget.allows_another(now=399)  # one more attempt can fail, too
    assert budget.allows_another(now=401)


def test_what_the_run_does_not_do_any_more_is_traced_again_sooner() -> None:
    budget = settled()
    budget.traced_step(1.4, own=0.0)
    plain_steps(budget)
    assert not budget.allows_another(now=90)
    assert budget.allows_another(now=90, outdated=True)
