"""Work of a steady step: counted, because a clock on a busy machine can't tell."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import memlog

pytestmark = pytest.mark.usefixtures("runs")

MEMLOG = str(Path(memlog.__file__).parent)
STEPS = 50
MOST_FILES = 10
MOST_CALLS = 19
MOST_LINES = 150


class Counts:
    """Calls of memlog's functions by file, and executed lines of memlog, on this thread."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.lines = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(MEMLOG):
            return None
        if event == "call":
            self.files[frame.f_code.co_filename] += 1
        elif event == "line":
            self.lines += 1
        return self.trace


def median(step: Callable[[], object]) -> Counts:
    """Return the counts of the median of `STEPS` steps. Some steps also publish memlog's health."""
    found = []
    before = sys.gettrace()
    for _ in range(STEPS):
        counts = Counts()
        sys.settrace(counts.trace)
        try:
            step()
        finally:
            sys.settrace(before)
        found.append(counts)
    return sorted(found, key=lambda one: one.lines)[STEPS // 2]


def test_a_steady_step_enters_few_files_and_runs_few_lines() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    session = memlog.init("local")
    live = session._live
    assert live is not None
    deadline = time.monotonic() + 60
    while live.batches.after_step is not None and time.monotonic() < deadline:
        step()  # until the helper process follows the steps
    assert live.batches.after_step is None
    for _ in range(300):  # the first steps read the inputs more often
        step()
    counts = median(step)
    memlog.finish()
    assert len(counts.files) <= MOST_FILES, counts.files
    assert counts.files.total() <= MOST_CALLS, counts.files
    assert counts.lines <= MOST_LINES
    judging = ("growth", "leaks", "alerts", "reports", "facts", "delivery")
    assert not [
        file
        for file in counts.files
        if file.startswith(tuple(f"{MEMLOG}/{room}/" for room in judging))
    ]
