"""Long runs, with the bounds that docs/limits.md tells the figures of."""

from pathlib import Path

import pytest

from benchmarks import limits

pytestmark = pytest.mark.slow


def test_memory_is_flat_and_an_event_small_over_a_million_of_them(tmp_path: Path) -> None:
    figures = limits.steady(tmp_path, 1_000_000)
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
    """What piled up while the client was imported is made good while steps go on coming."""
    told = limits.keeping_up(tmp_path, 1_000, 30)
    print(told)
    assert told["stage"] == "done"
    assert told["steps"] >= 29_000
    # Slower than the steps come, it would be as far behind as it was at the start, or further.
    assert told["behind_lowest"] <= 1_500
    # What is open of the last bucket, and no more, waits for the end of the run.
    assert told["behind_settled"] <= 20
