"""Long runs stay within the bounds of docs/limits.md."""

from pathlib import Path

import pytest
from support.journals import GIB, MIB, MadeRun, batch, cuda
from support.mlflow_server import sqlite_store

from benchmarks import limits

pytestmark = pytest.mark.slow


def test_memory_is_flat_and_an_event_small_over_300_000_of_them(tmp_path: Path) -> None:
    figures = limits.steady(tmp_path, 300_000)
    print(figures)
    assert figures["trainer_mib"] <= 5
    assert figures["helper_mib"] <= 5
    assert figures["bytes_an_event"] <= 180


def test_show_and_sync_stream(tmp_path: Path) -> None:
    """A journal ten times as long takes no more memory."""
    peaks = []
    for events in (1_000, 10_000):
        directory = tmp_path / str(events)
        directory.mkdir()
        sqlite_store(directory)
        made = MadeRun(directory / "runs", segment_bytes=16 * MIB)
        made.write(*(batch(step, GIB, cuda(GIB)) for step in range(events))).closed()
        peaks.append(limits.commands(directory))
    print(peaks)
    for command, small in peaks[0].items():
        assert peaks[1][command] - small <= 10


def test_delivery_of_a_thousand_events_a_second_catches_up(tmp_path: Path) -> None:
    """The delay of delivery during the run depends on the machine. `make limits` measures it."""
    result = limits.keeping_up(tmp_path, 1_000, 20)
    print(result)
    assert result["stage"] == "done"
    assert result["steps"] >= 19_000
    # Only the steps of the last bucket wait for the end of the run.
    assert result["behind_settled"] <= 20
