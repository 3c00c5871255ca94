"""The layers whose figures form series: chosen at the first trace, joined by others, never dropped."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from support.models import GPT, text

from memlog import MemoryTracer
from memlog.events import Trace
from memlog.trace.records import LayerFigures, TraceResult
from memlog.tracer.schedule.kept_trace import MAX_SERIES, TOP, trace_event


@pytest.fixture(scope="module")
def result() -> TraceResult:
    model, tracer = GPT(), MemoryTracer()
    with tracer.trace(model):
        model(text())
    return tracer.result


def event(result: TraceResult, series: set[str], sizes: Mapping[str, int]) -> Trace:
    layers = tuple(
        LayerFigures(
            path, (), allocated=size, peak=size, at_peak=size, at_peak_total=size, time_ms=1
        )
        for path, size in sizes.items()
    )
    return trace_event(msgspec.structs.replace(result, layers=layers), 1, 0, series)


def in_series(trace: Trace) -> set[str]:
    return {layer.path for layer in trace.layers if layer.in_series}


def test_no_series_ends_because_another_layer_is_larger(result: TraceResult) -> None:
    series = set[str]()
    first = {f"first.{n}": 100 + n for n in range(20)}
    largest = {f"first.{n}" for n in range(12, 20)}
    assert in_series(event(result, series, first)) == largest

    grown = {**first, **{f"later.{n}": 1000 + n for n in range(3)}}
    trace = event(result, series, grown)
    joined = {f"later.{n}" for n in range(3)}
    assert in_series(trace) == largest | joined
    assert [layer.path for layer in trace.layers[:3]] == ["later.2", "later.1", "later.0"]


def test_the_layers_of_a_series_are_few_but_an_event_has_the_largest(result: TraceResult) -> None:
    series, kept = set[str](), set[str]()
    for number in range(5):
        sizes = {f"{number}.{n}": 1 + n for n in range(TOP)}
        trace = event(result, series, {**dict.fromkeys(kept, 0), **sizes})
        assert {layer.path for layer in trace.layers[:TOP]} == set(sizes)
        assert kept <= in_series(trace)
        kept = in_series(trace)
        assert len(kept) <= MAX_SERIES
    assert len(kept) == MAX_SERIES
