"""Long runs, as far as a test has time for; docs/limits.md has them whole."""

from pathlib import Path

import pytest

from benchmarks import limits

pytestmark = pytest.mark.slow


def test_memory_is_flat_and_an_event_small(tmp_path: Path) -> None:
    figures = limits.steady(tmp_path, 200_000)
    print(figures)
    assert figures["trainer_mib"] <= 5
    assert figures["helper_mib"] <= 5
    assert figures["bytes_an_event"] <= 150


def test_show_and_sync_stream(tmp_path: Path) -> None:
    """Ten times the journal is no more memory."""
    peaks = []
    for events in (10_000, 100_000):
        directory = tmp_path / str(events)
        directory.mkdir()
        limits.steady(directory, events)
        peaks.append(limits.commands(directory))
    print(peaks)
    for command, small in peaks[0].items():
        assert peaks[1][command] - small <= 10


def test_delivery_keeps_up_with_a_thousand_events_a_second(tmp_path: Path) -> None:
    told = limits.keeping_up(tmp_path, 1_000, 15)
    print(told)
    assert told["stage"] == "done"
    # The client is imported meanwhile; then what is left is a few seconds' worth, not all of it.
    assert told["points_before"] > told["points"] / 3
