"""The tables of `docs/project/comparison.md`."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.comparison.__main__ import Done, cost_table, found_table
from benchmarks.comparison.arms import ARMS, SPIKE_STEP
from benchmarks.comparison.readings import READERS, Reading, text_about, wandb

PAGE = Path(__file__).parents[3] / "docs" / "project" / "comparison.md"


def done(arm: str, processor_ms: float = 5.0, *readings: Reading, text: str = "") -> Done:
    return Done(arm, 2.0, 6.0, processor_ms, 100.0, list(readings), text)


@pytest.mark.parametrize("arm", ARMS)
def test_the_page_has_what_was_measured_of_each_tool(arm: str) -> None:
    rows = PAGE.read_text(encoding="utf-8").count(f"\n| {arm} |")
    assert rows >= (2 if arm in READERS else 1)


def test_a_tool_in_a_trainer_is_measured_beside_the_trainer_alone() -> None:
    runs = {
        "bare": [done("bare", 5.0)],
        "memlog": [done("memlog", 5.5)],
        "Lightning": [done("Lightning", 7.0)],
        "Lightning, memlog": [done("Lightning, memlog", 7.25)],
    }
    added = {
        row.split("|")[1].strip(): row.split("|")[4].strip()
        for row in cost_table(runs).splitlines()
    }
    assert added["memlog"] == "0.50 [0.50, 0.50]"
    assert added["Lightning, memlog"] == "0.25 [0.25, 0.25]"
    assert added["Lightning"] == "(7.00 [7.00, 7.00] in all)"


def test_a_peak_counts_as_found_only_in_the_process_and_at_its_step() -> None:
    found = done("memlog", 5.0, Reading(50.0, 1), Reading(100.0, SPIKE_STEP))
    machine = done("MLflow system metrics", 5.0, Reading(None, SPIKE_STEP))
    leak = done("memlog", text="`validation_losses` gains one tensor per step")
    silent = done("MLflow system metrics")
    rows = found_table(
        {
            "spike": {"memlog": [found], "MLflow system metrics": [machine]},
            "killed": {"memlog": [found], "MLflow system metrics": [silent]},
            "leak": {"memlog": [leak], "MLflow system metrics": [silent]},
        }
    ).splitlines()
    assert rows[2].split(" | ")[2:] == [
        "the process",
        "1.00 [1.00, 1.00]",
        "1 of 1 runs",
        "2",
        "yes |",
    ]
    assert rows[3].split(" | ")[2:] == ["the machine", "-", "0 of 1 runs", "0", "no |"]


def test_a_wandb_file_is_read_for_the_memory_of_the_process(tmp_path: Path) -> None:
    (folder := tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    item = b"\x0a\x11proc.memory.rssMB\x82\x01\x0c345.69140625"
    (folder / "run-1.wandb").write_bytes(b"\x00" + item + b"\xff" + item)
    assert [reading.mib for reading in wandb(tmp_path)] == [345.69140625] * 2


def test_source_code_that_a_tool_copied_is_not_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "arms.py").write_text("validation_losses")
    (tmp_path / "summary.txt").write_text("no leak")
    assert text_about(tmp_path, "printed") == "printed\nno leak"
