"""Steps of a tracker's run: new, resumed, numbered by the user or by a trainer."""

import pytest

from memlog.autolog.run_detector import RunOffsets


def offsets(initial_step: int = 0, *, own: bool = False) -> RunOffsets:
    return RunOffsets(lambda _: own, initial_step)


@pytest.mark.parametrize(
    ("initial_step", "last_step", "next_step", "first"),
    [
        (0, None, 0, 0),
        (0, 29, 0, 30),
        (0, 29, 5, 30),  # the run was opened after five steps, which it gets, too
        (50, None, 50, 50),
        (50, 57, 50, 50),  # the user's own word
    ],
)
def test_the_first_run_begins(
    initial_step: int, last_step: int | None, next_step: int, first: int
) -> None:
    known = offsets(initial_step)
    offset = known.joined("t", "a", next_step, last_step, is_first=True)
    assert initial_step - offset == first


@pytest.mark.parametrize(("last_step", "first"), [(None, 0), (29, 30)])
def test_a_later_run_begins(last_step: int | None, first: int) -> None:
    assert 100 - offsets().joined("t", "b", 100, last_step, is_first=False) == first
    assert 7 - offsets(own=True).joined("t", "b", 7, last_step, is_first=True) == first


def test_a_later_session_of_the_process_goes_on_in_the_same_run() -> None:
    before = offsets()
    before.joined("t", "open", 0, 29, is_first=True)
    before.end("t", "open", 9)
    assert offsets().joined("t", "open", 0, 29, is_first=True) == -40


@pytest.mark.parametrize(
    ("number", "step", "rise"),
    [
        (30, None, 30),  # the user logs before the step
        (30, 0, 30),
        (1, 0, 1),
        (0, 0, 0),
        (9, 9, 0),  # the user logs each tenth step
        (2, 500, 0),  # the user's numbers count epochs
        (512, 15, None),  # they count samples, or memlog can't know
        (None, 0, None),
    ],
)
def test_the_users_number_of_the_first_row(
    number: int | None, step: int | None, rise: int | None
) -> None:
    known = offsets()
    known.joined("t", "a", 0, None, is_first=True)
    assert known.number_first_row("t", "a", number, step) == rise
    assert known.of("t", "a") == -(rise or 0)
    assert known.number_first_row("t", "a", 99, None) == 0, "asked once"


def test_what_is_known_counts_more_than_the_users_number() -> None:
    resumed, passed, trained = offsets(), offsets(50), offsets()
    resumed.joined("t", "a", 0, 29, is_first=True)
    passed.joined("t", "a", 50, None, is_first=True)
    trained.joined("t", "a", 0, None, is_first=True)
    trained.begin_at(0, 7)
    for known in (resumed, passed, trained):
        assert known.number_first_row("t", "a", 99, None) == 0


def test_a_run_whose_thread_leads_now_and_then_has_its_own_numbers() -> None:
    known, reads = offsets(), []

    def last_step() -> int | None:
        reads.append(1)
        return 29

    known.joined("t", "a", 0, None, is_first=True)  # its steps 0 to 9 are the session's
    assert [known.step_beside("t", "b", 5, last_step) for _ in range(3)] == [30, 31, 32]
    known.leave("t", "a", 10)
    assert 10 - known.joined("t", "b", 10, 29, is_first=False) == 33
    assert [known.step_beside("t", "a", 15, last_step) for _ in range(2)] == [10, 11]
    known.leave("t", "b", 20)
    assert 20 - known.joined("t", "a", 20, None, is_first=False) == 12
    assert known.step_beside("t", "b", 25, last_step) == 43
    assert reads == [1]
