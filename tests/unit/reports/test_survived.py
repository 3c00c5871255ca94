"""Batch sizes with which allocations failed."""

from pathlib import Path

import msgspec
import pytest
from support.journals import MIB, MadeRun, at, batch

from memlog.events import End, OutOfMemory, Status, TensorInput
from memlog.reports import summarize
from memlog.reports.final_state import final_state
from memlog.reports.postmortem import batch_sizes, survived


def failure(*, batch: int | None = None, **firsts: int) -> OutOfMemory:
    unknown = (None,) * 6
    inputs = tuple(TensorInput(name, (first, 32), "float32") for name, first in firsts.items())
    event = OutOfMemory(at(1), 0, "cuda0", None, None, *unknown, "no memory", inputs=inputs)
    return msgspec.structs.replace(event, batch=batch)


@pytest.mark.parametrize(
    ("failures", "sizes"),
    [
        ([failure(x=64, y=64)], [64]),
        ([failure(x=64, y=128)], []),  # one of them may be a mask, or the whole data set
        ([failure(x=64, y=64, data=6000), failure(x=32, y=32, data=6000)], [64, 32]),
        ([failure(x=64, data=6000), failure(x=32, mask=7), failure(x=16)], [64, 32, 16]),
        ([failure(x=64, tokens=500), failure(x=32, tokens=400)], []),
        ([failure(), failure(x=32)], [32]),
        ([failure(x=64, data=6000), failure(x=32, data=6000), failure()], [64, 32]),
        ([failure(x=64, data=6000), failure(x=32, data=6000), failure(mask=7, rows=9)], [64, 32]),
        ([failure(x=64, batch=60), failure(x=32, batch=30)], [60, 30]),
    ],
)
def test_sizes_are_what_the_failures_differ_in(
    failures: list[OutOfMemory], sizes: list[int]
) -> None:
    assert batch_sizes(failures) == sizes


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ([failure(x=64), failure(x=32)], "2 allocations … at step 1, with the batch sizes 64, 32"),
        ([failure(x=64), failure()], "2 allocations … at step 1; known batch size 64"),
        ([failure(), failure()], "2 allocations … at step 1"),
    ],
)
def test_a_size_that_is_not_known_is_not_told(
    tmp_path: Path, failures: list[OutOfMemory], text: str
) -> None:
    events = [
        msgspec.structs.replace(each, time_us=at(2 + number))
        for number, each in enumerate(failures)
    ]
    run = MadeRun(tmp_path).write(batch(0, MIB), *events, batch(1, MIB))
    assert survived(summarize(run.closed())) == text.replace("…", "failed and were survived")


@pytest.mark.parametrize(
    ("gradients", "phase", "status", "is_survived"),
    [
        (False, None, "finished", True),
        (False, "forward", "finished", True),
        (False, "forward", "failed", False),
        (False, "optimizer", "finished", False),  # training ended with it
        (True, "forward", "finished", False),
        (None, None, "finished", False),
    ],
)
def test_what_the_last_evaluation_survives_is_counted_and_does_not_begin_the_verdict(
    tmp_path: Path, gradients: bool | None, phase: str | None, status: Status, is_survived: bool
) -> None:
    failures = [
        msgspec.structs.replace(
            failure(x=rows), time_us=at(2 + number), gradients=gradients, phase=phase
        )
        for number, rows in enumerate((64, 32))
    ]
    run = MadeRun(tmp_path).write(batch(0, MIB), *failures, End(at(9), status)).closed()
    summary = summarize(run)
    assert ("Out of memory" in summary.verdict) is not is_survived
    text = "2 allocations failed and were survived at step 0, with the batch sizes 64, 32"
    assert survived(summary) == text * is_survived
    assert final_state(run).survived == 2 * is_survived
