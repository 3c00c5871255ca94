from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memlog.probes.process import PeakWindow


def test_without_a_mark_there_is_no_peak() -> None:
    assert PeakWindow().advance(10, None) == (None, None)


def test_a_mark_that_fell_leaves_the_highest_known_value() -> None:
    window = PeakWindow()
    assert window.advance(60, 100) == (100, "watermark")
    assert window.advance(20, 30) == (60, "sampled")
    assert window.advance(20, 30) == (30, "watermark")
    assert window.advance(20, 40) == (40, "exact")


def test_the_current_value_may_be_unknown() -> None:
    window = PeakWindow()
    assert window.advance(None, 100) == (100, "watermark")
    assert window.advance(None, 30) == (30, "sampled")


def test_more_in_use_than_the_mark_says_counts() -> None:
    window = PeakWindow()
    assert window.advance(60, 50) == (60, "watermark")
    assert window.advance(70, 65) == (70, "exact")


def test_a_gap_in_the_marks_makes_the_window_longer() -> None:
    window = PeakWindow()
    window.advance(10, 50)
    window.advance(10, None)
    assert window.advance(10, 60) == (60, "exact")


SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.booleans(), SIZES), min_size=1, max_size=20))
def test_each_source_is_right_for_an_allocator_that_others_reset(
    windows: list[tuple[bool, list[int]]],
) -> None:
    """Each window is a flag and the sizes in use. The flag is true if other code resets the mark first."""
    probe = PeakWindow()
    current = mark = 0
    for reset, sizes in windows:
        opening = current
        if reset:
            mark = current
        current = sizes[-1]
        mark = max(mark, *sizes)
        truth = max(opening, *sizes)

        peak, source = probe.advance(current, mark)

        assert peak is not None
        if source == "exact":
            assert peak == truth
        elif source == "watermark":
            assert peak >= truth
        else:
            assert source == "sampled"
            assert max(opening, current) <= peak <= truth
