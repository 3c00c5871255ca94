"""Evidence about memory after the steps, also if memlog's own search has taken memory and left some free."""

import pytest

from memlog._internal.terminal import MIB
from memlog.facts.levels import HOST, LevelFold

SEARCH = 13
"""Steps of a search."""
TAKEN, LEFT_FREE = 35, 17
"""MiB that a search takes in all, and the part of it that is free for the program at its end."""


def fold(rises: list[float], begin: int) -> LevelFold:
    """Return the levels of a program that keeps ``rises`` MiB at its steps.

    A search begins at the step ``begin``.
    """
    levels = LevelFold()
    kept, held = 300.0, 0.0
    for step, rise in enumerate(rises):
        kept += rise
        if begin <= step < begin + SEARCH:
            held = TAKEN * (step + 1 - begin) / SEARCH
        elif step == begin + SEARCH:
            held = TAKEN - LEFT_FREE
            level = kept + TAKEN
        known = kept + held
        level = known if step < begin + SEARCH else max(level, known)
        levels.add(HOST, step, int(level * MIB))
        if step in (begin - 1, begin + SEARCH - 1):
            levels.take_search(goes_on=step < begin)
    return levels


@pytest.mark.parametrize("rate", [0.5, 1, 2, 4])
@pytest.mark.parametrize("begin", [20, 67, 200])
def test_growth_into_what_a_search_left_free_is_no_all_clear(rate: float, begin: int) -> None:
    for steps in range(begin + SEARCH, begin + 100, 3):
        known = fold([rate] * steps, begin).evidence(HOST)
        assert known is not None
        assert known.since is None, (steps, known)


def test_a_full_cache_is_steady_after_a_search_and_what_was_left_free_is_not_excluded() -> None:
    known = fold([1.0] * 60 + [0.0] * 300, begin=50).evidence(HOST)
    assert known is not None
    assert known.since is not None
    assert known.excluded > LEFT_FREE * MIB
