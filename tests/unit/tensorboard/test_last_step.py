"""Last step in memlog's event file, read without tensorboard's modules."""

from pathlib import Path

import pytest

from memlog.events import Alert
from memlog.sink import Point, Target, TrackerRun
from memlog_tensorboard import backend


def file_in(folder: Path, steps: range) -> Path:
    """Write memlog's values at ``steps``, and texts at other steps, as an earlier session did."""
    sink = backend.open_sink(Target("r", TrackerRun(str(folder))))
    sink.log_parameters({f"parameter {number}": "1" for number in range(500)})
    sink.log_points([Point("memory/host/rss_mib", 1.0, "step", step, step + 1) for step in steps])
    sink.log_points([Point("memory/epoch/host/rss_mib", 1.0, "epoch", 900, 1)])
    sink.log_alerts([Alert(1, 950, "warning", "a rule", "title", "text")], 0)
    sink.close(None)
    (file,) = folder.glob("*memlog*")
    return file


@pytest.mark.parametrize("steps", [range(1), range(3), range(100, 400)])
def test_it_is_the_last_step_with_memory(tmp_path: Path, steps: range) -> None:
    file_in(tmp_path, steps)
    assert backend.last_step(TrackerRun(str(tmp_path))) == steps[-1]


def test_a_file_that_is_cut_off_has_the_steps_before(tmp_path: Path) -> None:
    file = file_in(tmp_path, range(300))
    whole = file.read_bytes()
    found = []
    for size in range(0, len(whole), 97):
        file.write_bytes(whole[:size])
        found.append(backend.last_step(TrackerRun(str(tmp_path))))
    assert None in found
    steps = [step for step in found if step is not None]
    assert steps == sorted(steps)
    assert steps[-1] == 299


def test_a_new_folder_has_none(tmp_path: Path) -> None:
    assert backend.last_step(TrackerRun(str(tmp_path))) is None
    assert backend.last_step(TrackerRun(str(tmp_path / "missing"))) is None
