"""However long a trace is, it takes little memory and its totals hold."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from support.models import mlp

from memlog import MemoryTracer
from memlog.trace.accounting import Accountant
from memlog.trace.encoding import ACTIVATION, ALLOC, EVENT_BYTES, FORWARD, FREE, pack
from memlog.tracer.engines.storage_events import EventLog

EVENTS = 100_000
LIMIT = 12 * 10**6


def steps(tracer: MemoryTracer, count: int) -> Any:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with tracer.trace(model):
        for _ in range(count):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracer.result


@pytest.mark.seed(174, 224)
def test_past_the_limit_totals_and_peaks_are_those_of_all_events() -> None:
    whole = steps(MemoryTracer(), 12)
    cut = steps(MemoryTracer(max_events=100), 12)

    assert not whole.truncated
    assert cut.truncated
    assert (cut.kept_events, cut.events) == (100, whole.events)
    assert cut.events == whole.events == whole.kept_events
    assert (cut.peak, cut.before, cut.end) == (whole.peak, whole.before, whole.end)
    assert cut.categories == whole.categories

    def totals(result: Any) -> Any:
        return {
            (layer.path, phase.phase): (phase.calls, phase.allocations, phase.allocated, phase.peak)
            for layer in result.layers
            for phase in layer.phases
        }

    assert totals(cut) == totals(whole)


@pytest.mark.seed(218, 219)
@pytest.mark.slow
def test_a_hundred_thousand_events_take_under_12_mb() -> None:
    """All memory that the tracer itself holds while it records and analyses counts."""
    tracemalloc.start()
    try:
        books = Accountant()
        log = EventLog(EVENTS, books)
        for number in range(EVENTS // 2):
            log.append(pack(number, 512, number, 0, ALLOC, FORWARD, ACTIVATION, 0))
            log.append(pack(number, 0, number, 0, FREE, 0, 0, 0))
        recorded = tracemalloc.get_traced_memory()[0]
        events, kept = log.close()
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kept == EVENTS
    assert len(events) / kept == EVENT_BYTES == 32
    assert (
        recorded < 1.2 * EVENTS * EVENT_BYTES + 100_000
    )  # a bytearray grows by an eighth at a time
    assert highest < LIMIT


@pytest.mark.slow
def test_a_hundred_thousand_events_of_training_take_under_12_mb() -> None:
    count = 11 * EVENTS // steps(MemoryTracer(), 10).events
    tracemalloc.start()
    try:
        result = steps(MemoryTracer(max_events=EVENTS), count)
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.events >= EVENTS
    assert result.kept_events == EVENTS
    assert highest < LIMIT


@pytest.mark.slow
def test_a_hundred_thousand_storages_that_stay_take_under_12_mb_too() -> None:
    def work() -> Any:
        return [torch.empty(8) for _ in range(EVENTS)]

    model, tracer = torch.nn.Linear(4, 4), MemoryTracer()
    with tracer.trace(model):
        torch.empty(8)
    tracemalloc.start()
    try:
        kept = work()
        users = tracemalloc.get_traced_memory()[0]
        del kept
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with tracer.trace(model):
            kept = work()
            large = torch.empty(64 * 1024)
        highest = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(kept) == EVENTS
    assert highest - users < LIMIT
    result: Any = tracer.result
    assert result.exactness == "lower bound"
    (dropped,) = result.dropped.items()
    assert dropped[0].startswith("storages under 64 KiB")
    assert dropped[1] == EVENTS - 12_500 + 2  # the model's weight and bias were there before
    assert result.end - result.before == (12_500 - 2) * 32 + large.nbytes


@pytest.mark.seed(200, 220, 221)
@pytest.mark.slow
def test_the_log_does_not_grow_past_its_limit() -> None:
    log = EventLog(1000, Accountant())
    largest = 0
    for number in range(100_000):
        log.append(pack(number, 512, number, 0, ALLOC, FORWARD, ACTIVATION, 0))
        log.append(pack(number, 0, number, 0, FREE, 0, 0, 0))
        log.fold_when_full()
        largest = max(largest, len(log._appended) + sum(map(len, log._kept)))
    assert largest <= (1000 + 8192 + 2) * EVENT_BYTES
    _, kept = log.close()
    assert (log.events, kept) == (200_000, 1000)
    assert log.accountant.rows[0, FORWARD].allocations == 100_000
    assert log.accountant.live_bytes == 0
    assert log.accountant.peak_bytes == 512
