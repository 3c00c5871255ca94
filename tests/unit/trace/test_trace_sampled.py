"""Figures from readings of an allocator alone: some are known, others unknown."""

from __future__ import annotations

import pytest

from memlog.trace.accounting import Accountant
from memlog.trace.encoding import ENTER, EXIT, FORWARD, READING, pack
from memlog.trace.records import TraceResult
from memlog.trace.result import TraceFacts, build
from memlog.trace.summary import summary_text
from memlog.tracer.schedule.kept_trace import trace_event


@pytest.fixture
def result() -> TraceResult:
    """Return the result of a module with readings of 100 bytes at its begin, then 900, and 400 at its end."""
    accountant = Accountant(by_readings=True)
    for at, (kind, live) in enumerate(
        ((READING, 100), (ENTER, 0), (READING, 900), (READING, 400), (EXIT, 0))
    ):
        size = 1000 if kind == READING else 0
        accountant.fold(pack(live, size, at, 1, kind, FORWARD, 0, 0))
    accountant.finish()
    facts = TraceFacts(
        engine="sampler",
        why="the only one for mps",
        device="mps:0",
        exactness="sampled",
        started_us=0,
        duration_ns=5,
        events=5,
        kept_events=5,
        dropped={},
        unseen=(),
        fragmentation=None,
        fragmentation_reason=None,
    )
    return build(accountant, ("(outside modules)", "Model"), facts)


def test_figures_that_readings_give_are_known(result: TraceResult) -> None:
    (layer,) = result.layers
    assert (result.before, result.peak, result.end) == (100, 900, 400)
    assert (layer.peak, layer.reserved_peak) == (900, 1000)
    assert [(phase.calls, phase.peak, phase.kept) for phase in layer.phases] == [(1, 900, 300)]


def test_figures_that_readings_do_not_give_are_unknown(result: TraceResult) -> None:
    (layer,) = result.layers
    assert (layer.allocated, layer.at_peak, layer.at_peak_total) == (None, None, None)
    (phase,) = layer.phases
    assert (phase.allocations, phase.allocated, phase.frees) == (None, None, None)
    assert (result.attributed, result.unattributed) == (None, {})

    row = next(line for line in summary_text(result).splitlines() if line.startswith("Model"))
    assert row.split()[:-1] == ["Model", "unknown", "unknown", "900", "B", "300", "B"]
    (traced,) = trace_event(result, 1).layers
    assert (traced.at_peak, traced.peak, traced.allocated, traced.kept) == (None, 900, None, 300)
