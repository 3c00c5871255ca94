"""The time that searches for a cause may take together."""

from __future__ import annotations

import time

import pytest

from memlog.leaks.process_objects import EarnedTime


@pytest.fixture
def clock(monkeypatch):
    """Processor seconds of the process: a list of one number that the test changes."""
    seconds = [100.0]
    monkeypatch.setattr(time, "process_time", lambda: seconds[0])
    return seconds


def test_the_first_search_need_not_be_earned(clock):
    assert EarnedTime().is_enough


def test_another_search_waits_until_the_run_has_earned_both(clock):
    earned = EarnedTime()
    earned.take(0.4)
    assert not earned.is_enough  # 0.8 s of 0.5 s
    clock[0] += 9
    assert not earned.is_enough  # of 0.77 s
    clock[0] += 2
    assert earned.is_enough  # of 0.83 s


def test_a_long_search_is_followed_by_none_in_a_short_run(clock):
    earned = EarnedTime()
    earned.take(0.1)
    assert earned.is_enough
    earned.take(2.0)
    clock[0] += 60
    assert not earned.is_enough
    clock[0] += 60
    assert earned.is_enough
