"""The text of a run's description."""

from pathlib import Path

from support.journals import GIB, MIB, MadeRun, at, batch

from memlog.events import Alert, Health, Trace, TracedLayer
from memlog.reports.description import description


def test_the_description_has_rows_for_alerts_and_lost_data(tmp_path: Path) -> None:
    layers = tuple(
        TracedLayer(f"blocks.{number}|x", number * MIB, GIB, MIB, MIB) for number in range(1, 7)
    )
    sizes = {"activations": 30 * MIB, "parameters": 10 * MIB}
    made = MadeRun(tmp_path).write(batch(0, GIB))
    made.write(
        Alert(at(0), 0, "warning", "memlog: shutdown", "Ended unexpectedly after step 0", ""),
        Alert(at(0), 0, "warning", "host.rss > 1 KiB", "host.rss is *<1|2> GiB*", ""),
        Trace(at(0), 0, "dispatch", True, 40 * MIB, sizes, layers, 0),
        Health(at(1), 0, 0.5, 2.0, {"labels": 3}, {}, steps=4),
    )
    run = made.closed()
    text = description(run, "mlflow", "f24c")
    assert r"| Alerts | host.rss is \*\<1\|2> GiB\* |" in text
    assert "| memlog itself | 0.5 ms a step; lost: labels 3 |" in text
    assert "traced" not in text  # the step's file is gone, and with it the flame graph
    assert "`memlog pull f24c --backend mlflow -o out`" in text
    assert "memlog pull" not in description(run, "tensorboard")  # it stores no files
    assert len(text) < 5000
