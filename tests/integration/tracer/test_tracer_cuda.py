"""The native engine against a real device: tests of facts that only torch's sources document.

To run all its tests: ``pytest -m gpu tests/integration/tracer/test_tracer_cuda.py``.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import speedscope
from support.models import GPT, UNet, mlp, text

from memlog import MemoryTracer
from memlog.artifacts.snapshots import read_snapshot
from memlog.trace import exporters
from memlog.tracer.window import TraceWindow

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"

MODELS = {
    "mlp": (mlp, lambda: torch.randn(4096, 64)),
    "gpt": (lambda: GPT(width=128, blocks=4), lambda: text(16, 64)),
    "gpt, reentrant": (lambda: GPT(128, 4, checkpointing="reentrant"), lambda: text(16, 64)),
    "gpt, not reentrant": (lambda: GPT(128, 4, checkpointing="not"), lambda: text(16, 64)),
    "unet": (lambda: UNet(16), lambda: torch.randn(8, 2, 64, 64)),
}


class Training:
    """A model that has made its first step on the device."""

    def __init__(self, name: str) -> None:
        make, inputs = MODELS[name]
        self.model = make().to(DEVICE)
        self.batch = inputs().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(params=MODELS)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(request.param)


def stat(name: str) -> int:
    return int(torch.cuda.memory_stats(DEVICE)[name])


def test_the_peak_and_the_end_are_the_allocators_own(training: Training) -> None:
    tracer = MemoryTracer()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    with tracer.trace(training.model):
        training.step()

    result: Any = tracer.result
    assert (result.engine, result.exactness, result.dropped) == ("native", "exact", {})
    assert result.end == stat("allocated_bytes.all.current")
    assert result.peak == stat("allocated_bytes.all.peak")
    assert sum(share.size for share in result.shares) == result.peak
    assert result.attributed >= 0.9
    assert not tracer.health.faults


def test_categories_and_phases_are_known(training: Training) -> None:
    tracer = MemoryTracer()
    with tracer.trace(training.model):
        training.step()
    parameters = sum(p.untyped_storage().nbytes() for p in training.model.parameters())
    categories = tracer.result.categories
    assert categories["parameters"] >= parameters
    assert categories["optimizer state"] >= parameters
    phases = {figures.phase for layer in tracer.result.layers for figures in layer.phases}
    assert phases >= {"forward", "backward", "optimizer"}


def test_fragmentation_comes_from_the_blocks_and_for_every_layer() -> None:
    training, tracer = Training("unet"), MemoryTracer()
    with tracer.trace(training.model):
        training.step()
    found = tracer.result.fragmentation
    assert found.source == "blocks"
    assert found.reserved == torch.cuda.memory_reserved(DEVICE)
    assert found.allocated == torch.cuda.memory_allocated(DEVICE)
    assert all(0 <= (ratio or 0) <= 1 for ratio in tracer.get_fragmentation_stats().values())
    assert tracer.get_layer_stats()["out"].peak_reserved


def test_notes_reach_autograds_threads_and_are_taken_back() -> None:
    training, tracer = Training("mlp"), MemoryTracer()
    with tracer.trace(training.model):
        training.step()
    backward = tracer.get_layer_figures("2").phase("backward")
    assert backward is not None
    assert backward.allocated > 0
    assert torch.cuda.memory._get_memory_metadata() == ""
    assert not torch._C._cuda_isHistoryEnabled()


def test_the_users_history_stays_on_and_whole() -> None:
    training, tracer = Training("mlp"), MemoryTracer()
    torch.cuda.memory._record_memory_history("all", max_entries=100_000)
    try:
        marker = torch.empty(123_456, device=DEVICE)
        with tracer.trace(training.model):
            training.step()
        assert torch._C._cuda_isHistoryEnabled()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert marker.data_ptr() in {entry.get("addr") for entry in trace}
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert tracer.result.attributed > 0.9


def test_the_users_own_notes_are_left_alone() -> None:
    training, tracer = Training("mlp"), MemoryTracer()
    torch.cuda.memory._set_memory_metadata("mine")
    try:
        with tracer.trace(training.model):
            training.step()
        assert torch.cuda.memory._get_memory_metadata() == "mine"
    finally:
        torch.cuda.memory._set_memory_metadata("")
    assert tracer.result.engine == "sampler"
    assert "metadata of its own" in tracer.result.why


def test_the_users_peak_is_never_reset() -> None:
    training = Training("mlp")
    high = torch.empty(64 << 20, device=DEVICE)
    del high
    before = torch.cuda.max_memory_allocated(DEVICE)
    for engine in ("native", "sampler"):
        tracer = MemoryTracer(engine=engine)  # type: ignore[arg-type] # both are names of engines
        with tracer.trace(training.model):
            training.step()
    assert torch.cuda.max_memory_allocated(DEVICE) == before


def test_the_sampler_stays_below_the_native_peak() -> None:
    training = Training("unet")
    peaks = {}
    for engine in ("native", "sampler"):
        tracer = MemoryTracer(engine=engine)  # type: ignore[arg-type] # both are names of engines
        with tracer.trace(training.model):
            training.step()
        peaks[engine] = tracer.result.peak or 0
        assert tracer.result.exactness == {"native": "exact", "sampler": "sampled"}[engine]
    assert 0.3 * peaks["native"] < peaks["sampler"] <= peaks["native"] * 1.02


def test_two_threads_are_distinguished() -> None:
    trainings = [Training("mlp"), Training("gpt")]
    tracer = MemoryTracer()
    thread = threading.Thread(target=trainings[1].step)
    with tracer.trace(trainings[0].model):
        thread.start()
        trainings[0].step()
        thread.join(timeout=60)
    assert not tracer.health.faults
    forward = tracer.get_layer_figures("0").phase("forward")
    assert forward.calls == 1


def test_history_keys_and_clock_are_as_the_sources_say() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=65536, clear_history=True
    )
    try:
        torch.cuda.memory._set_memory_metadata("ml1")
        tensor = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        del tensor
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._set_memory_metadata("")
        torch.cuda.memory._record_memory_history(enabled=None)
    entry = next(one for one in trace if one["action"] == "alloc")
    assert {"action", "addr", "size", "stream", "time_us", "user_metadata"} <= set(entry)
    if torch.__version__ >= (2, 11):
        assert {"compile_context", "pool_id"} <= set(entry)
    assert entry["user_metadata"] == "ml1"
    assert entry["size"] in (1000, 1024)
    assert abs(entry["time_us"] - time.time_ns() // 1000) < 60_000_000
    assert {one["action"] for one in trace} >= {"alloc", "free_requested"}


def test_torchs_own_snapshot_is_read_by_the_unpickler_that_imports_nothing(tmp_path: Path) -> None:
    training = Training("mlp")
    torch.cuda.memory._record_memory_history("all", max_entries=10_000)
    try:
        training.step()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    document = read_snapshot(tmp_path / "snapshot.pickle")
    assert document["segments"]
    assert any(document["device_traces"])


# `make_graphed_callables` keeps the autograd graph of its warm-up, which ran on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_a_captured_graph_is_replayed_under_a_trace() -> None:
    model = torch.nn.Linear(64, 64).to(DEVICE)
    batch = torch.ones(8, 64, device=DEVICE)
    graphed = torch.cuda.make_graphed_callables(model, (batch,))
    tracer = MemoryTracer()
    with tracer.trace(model):
        graphed(batch)
    assert any("CUDA graph" in sentence for sentence in tracer.result.unseen)
    assert not tracer.health.faults


def test_without_a_model_the_device_in_use_is_traced() -> None:
    training, tracer = Training("mlp"), MemoryTracer()
    with tracer.trace():
        training.step()
    assert tracer.result.device == DEVICE
    assert tracer.result.categories["parameters"] > 0


def test_an_error_in_the_block_leaves_nothing_on() -> None:
    training, tracer = Training("mlp"), MemoryTracer()
    with pytest.raises(torch.OutOfMemoryError), tracer.trace(training.model):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    assert not torch._C._cuda_isHistoryEnabled()
    training.step()


def test_exports_are_valid(training: Training) -> None:
    window = TraceWindow(training.model)
    window.start()
    training.step()
    document = exporters.flame_graph(window.stop())
    speedscope.check(document)
    assert document["profiles"][0]["endValue"] == window.stop().result.peak
