"""The benchmark of gates counts a verdict as wrong if it is."""

from pathlib import Path

from benchmarks.gate import page
from memlog.reports.figures import RunFigures


def run(peak: float, rss: float) -> RunFigures:
    figures = {"trace.peak": peak * 1e6, "host.rss": rss * 1e6}
    return RunFigures("a", "benchmark", "finished", 4, figures, {}, {}, int(peak * 1e6), "traced")


def test_wrong_and_unsure_verdicts_are_counted(tmp_path: Path) -> None:
    first = [run(100, 500 + at) for at in range(5)]
    steady = [run(100, 500 + at) for at in range(9)] + [run(102, 500)]
    heavier = [run(101, 501 + at) for at in range(9)] + [run(100, 501)]
    rows = [line.split(" | ") for line in page(first, steady, heavier, tmp_path / "memory.json")]
    exact, repeats, alone = (row for row in rows if row[0].startswith("| `"))
    assert exact[1:] == ["1", "0", "1", "0", "20 |"]
    assert repeats[1:] == ["0", "2", "0", "2", "4 |"]
    assert alone[1:] == ["8", "0", "0", "0", "20 |"]
