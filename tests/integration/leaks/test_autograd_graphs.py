"""Nodes and storages that a walk through autograd graphs counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
from memlog.leaks.autograd_graphs import GraphWalk  # noqa: E402 - it loads torch
from memlog.leaks.live_tensors import LiveTensors  # noqa: E402
from memlog.leaks.process_objects import TimeBudget  # noqa: E402
from memlog.torchside.internals import next_sequence_number  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]


@pytest.fixture
def _anomalies() -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=False):
        yield


def traceback_bytes() -> tuple[int, int]:
    """Return the nodes of a graph, and the bytes of their tracebacks."""
    first = next_sequence_number()
    assert first is not None
    kept = torch.ones(4, requires_grad=True).exp().sin().sum()
    tensors = LiveTensors([kept], frozenset(), first, TimeBudget(9))
    [graph] = GraphWalk(first, first + 100, TimeBudget(9)).graphs(tensors)
    return graph.nodes, graph.traceback_bytes


@pytest.mark.usefixtures("_anomalies")
def test_anomaly_detection_keeps_a_traceback_with_each_node() -> None:
    nodes, size = traceback_bytes()
    assert nodes == 3
    assert nodes * 500 < size < nodes * 50_000


def test_no_tracebacks_without_anomaly_detection() -> None:
    assert traceback_bytes() == (3, 0)
