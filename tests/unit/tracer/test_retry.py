"""Choice of the steps in which memlog tries to trace."""

from memlog.tracer.schedule.budget import RetryPolicy


def attempts(retry: RetryPolicy, steps: int) -> list[int]:
    """Numbers of the steps in which memlog tries to trace if each attempt fails."""
    found = []
    for step in range(steps):
        if retry.next_step(allowed=False):
            found.append(step)
            retry.postpone()
    return found


def test_what_fails_is_tried_ever_more_rarely() -> None:
    retry = RetryPolicy()
    retry.want()
    assert attempts(retry, 130) == [0, 1, 3, 7, 15, 31, 63, 95, 127]


def test_who_asks_again_need_not_wait() -> None:
    retry = RetryPolicy()
    retry.want()
    attempts(retry, 10)
    retry.want()
    assert retry.next_step(allowed=False)


def test_after_one_that_began_it_is_the_budget_that_decides() -> None:
    retry = RetryPolicy()
    retry.want()
    retry.done()
    assert not retry.next_step(allowed=False)
    assert retry.next_step(allowed=True)


def test_what_can_never_be_is_not_tried_unless_somebody_asks() -> None:
    retry = RetryPolicy()
    retry.disable()
    assert not retry.next_step(allowed=True)
    retry.want()
    assert retry.next_step(allowed=False)
