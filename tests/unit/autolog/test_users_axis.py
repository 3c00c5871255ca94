"""Choice of the axis of the user's numbers."""

from collections.abc import Callable, Mapping

import pytest

from memlog.autolog.users_axis import UsersAxis

Logged = Callable[[int], Mapping[int, int]]
"""Function from a step to the numbers at which the program logs before the step, with their counts."""


def numbers(logged: Logged, steps: int, begin: int = 0) -> list[int]:
    """Return each step's number on the axis. ``begin``: Steps that an earlier process has made."""
    axis, ahead, found = UsersAxis(), 0, []
    for step in range(begin, steps):
        told = axis.number_to_tell(step, step - begin, logged(step))
        ahead = ahead if told is None else told - step
        found.append(step + ahead)
    return found


def own(steps: int, begin: int = 0) -> list[int]:
    return list(range(begin, steps))


@pytest.mark.parametrize(
    "logged",
    [
        lambda step: {step - 1: 1, 256 * step: 1} if step else {},
        lambda step: {step: 1, 256 * step: 9},
        lambda step: {step: 1, 256 * step: 1} if step % 10 == 0 else {},
        # The losses by iteration every ten steps, an evaluation by samples alone every 25.
        lambda step: {step: 1} if step % 10 == 0 else {256 * step: 1} if step % 25 == 0 else {},
        lambda step: {0: 1, 10_000: 1} if step == 0 else {step - 1: 1},
        lambda step: {step // 20: 1},
        lambda step: {step: 1} if step != 30 else {2**50: 5},
    ],
    ids=["megatron", "more by samples", "rare", "evaluation", "baseline", "epochs", "outlier"],
)
def test_an_axis_of_optimizer_steps_stays_memlogs(logged: Logged) -> None:
    assert numbers(logged, 100) == own(100)


def test_numbers_of_a_resumed_trainer_are_followed_beside_its_samples() -> None:
    found = numbers(lambda step: {1000 + step: 1, 256 * (1000 + step): 1} if step else {}, 50)
    assert found[3:] == list(range(1003, 1050))


def test_a_run_goes_on_from_its_last_checkpoint() -> None:
    """It is ten steps older than the run's last step."""
    for logged in (lambda step: {step - 10: 1}, lambda step: {step - 10: 1, 32 * (step - 10): 1}):
        assert numbers(logged, 100, begin=60)[3:] == list(range(53, 90))


@pytest.mark.parametrize(
    "logged",
    [
        lambda step: {step // 20: 1},
        lambda step: {step: 1, step % 20: 1},
        lambda step: {step // 7: 3},
    ],
    ids=["epochs", "batches", "many epochs"],
)
def test_numbers_behind_a_run_that_goes_on_are_no_checkpoint(logged: Logged) -> None:
    assert numbers(logged, 200, begin=60) == own(200, 60)


def test_an_iteration_counts_steps_that_the_scaler_skipped() -> None:
    """memlog does not see these steps."""
    found = numbers(lambda step: {step + 16 + step // 30: 1, 256 * (step + 16): 1}, 100)
    assert found[3:30] == list(range(19, 46))
    assert found[33:60] == list(range(50, 77))
    assert max(found[3:]) < 130


def frames(step: int) -> dict[int, int]:
    """Sixteen optimizer steps follow on each 512 frames."""
    return {32 * step: 1} if step % 16 == 0 else {}


def test_frames_are_followed() -> None:
    expected = [32 * (step - step % 16) + step % 16 for step in range(200)]
    assert numbers(frames, 200) == expected


def test_the_number_at_which_most_is_logged_counts() -> None:
    found = numbers(lambda step: {512 * step: 3, 10**8 + 512 * step: 1} if step else {}, 20)
    assert found == [512 * step for step in range(20)]


def test_one_number_far_ahead_is_left_again() -> None:
    def logged(step: int) -> Mapping[int, int]:
        return {10**9: 1} if step == 20 else frames(step)

    found = numbers(logged, 200)
    assert found[20] == 10**9
    # Three readings later.
    assert found[64:] == numbers(frames, 200)[64:]


def test_many_frames_with_a_common_distance_by_chance_are_frames() -> None:
    def logged(step: int) -> Mapping[int, int]:
        return {32 * step - back: 1 for back in range(0, 512, 16)} if step % 16 == 0 else {}

    assert numbers(logged, 200)[16:] == numbers(frames, 200)[16:]


@pytest.mark.parametrize(
    "logged",
    [
        lambda step: {100 + step // 10 - 1: 1} if step and step % 10 == 0 else {},
        lambda step: {50 + step // 25 - 1: 1} if step and step % 25 == 0 else {},
        lambda step: {20 + step // 5 - 1: 2} if step and step % 5 == 0 else {},
        lambda step: {300 + (step + 1) // 2: 1} if step > 1 else {},
    ],
    ids=["epochs", "long epochs", "two metrics", "frames with two updates each"],
)
def test_a_number_that_equals_a_step_by_chance_moves_nothing_back(logged: Logged) -> None:
    found = numbers(logged, 1_200)
    assert found == sorted(set(found))


def test_as_many_numbers_are_told_as_a_metric_has_points() -> None:
    axis = UsersAxis()
    told = [
        (step, number)
        for step in range(30_000)
        if (number := axis.number_to_tell(step, step, {32 * (step + 1): 1})) is not None
    ]
    assert len(told) == 12_000
    assert told[-1] == (29_990, 32 * 29_991)
