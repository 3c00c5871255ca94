"""What memlog says about a device's allocator: fragmentation, private pools and retries in real programs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import child

from memlog.events import Batch, Device, Finding
from memlog.journal import RunDirectory, list_runs

pytestmark = pytest.mark.cuda

MIB = 2**20

PROGRAM = """
import random
import torch
from torch import nn
import memlog

random.seed(0)
MIB = 2**20
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        weights = (x @ x.transpose(-1, -2)).softmax(-1)
        return x + self.narrow(nn.functional.gelu(self.wide(x))) + weights @ x
model = nn.Sequential(*[Block(128) for _ in range(2)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(batch, length):
    model(torch.randn(batch, length, 128, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
def buffer(size):
    return torch.empty(int(size), dtype=torch.uint8, device="cuda")
kept = []
memlog.init("local")
"""

LONGER = "for step in range(700): train(16, 64 + step)"
BUFFERS = """
for step in range(700):
    kept.append(buffer((4 + step / 16) * MIB))
    del kept[:-16]
    train(8, 64)
"""
"""Sixteen buffers are in use at a time. Each is a little longer than the ones before it."""
CAPTURES = """
x = torch.ones(MIB, device="cuda")
for step in range(700):
    train(8, 64)
    if step % 8 == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        kept.append(graph)
"""

HEALTHY = {
    "lengths": "for step in range(700): train(8, random.randrange(32, 512))",
    "lengths and batches": (
        "for step in range(700): train(random.randrange(4, 32), random.randrange(32, 300))"
    ),
    "a large evaluation": """
for step in range(700):
    if step in (200, 500):
        parts = [buffer(60 * MIB) for _ in range(20)]
        del parts
    train(8, 256)
""",
    "a bounded cache": """
for step in range(700):
    kept.append(buffer(random.randrange(MIB, 9 * MIB)))
    if len(kept) > 32: kept.pop(random.randrange(32))
    train(8, random.randrange(32, 256))
""",
    "graphs captured once": """
x = torch.ones(MIB, device="cuda")
for step in range(700):
    train(8, 64)
    if step in range(20, 60, 4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        kept.append(graph)
""",
}


def trained(
    folder: Path, program: str, *, expandable: bool = False, memory: str = "16GiB"
) -> RunDirectory:
    process = child.start(
        PROGRAM + program,
        folder,
        fork=False,
        FAKE_CUDA_MEMORY=memory,
        FAKE_CUDA_COPY="4k",
        FAKE_CUDA_STATE=str(folder / "devices"),
        PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}",
    )
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    (run,) = list_runs(folder / "memlog_runs")
    return run


def shown(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        child.memlog("show", "latest", "--json", directory=folder)
    )
    return document


def found(run: RunDirectory) -> dict[str, Finding]:
    findings = [event for event in run.events() if isinstance(event, Finding)]
    return {finding.kind: finding for finding in findings}


@pytest.mark.parametrize("program", [LONGER, BUFFERS], ids=["longer inputs", "longer buffers"])
def test_memory_that_does_not_fit_is_fragmentation(tmp_path: Path, program: str) -> None:
    run = trained(tmp_path, program)
    finding = found(run)["device_fragmentation"]
    assert finding.where == "cuda0"
    assert finding.remedy is not None
    assert "expandable_segments:True" in finding.remedy
    assert finding.forecast is None
    newest = [event for event in run.events() if isinstance(event, Batch)][-1].devices[0]
    assert newest.reserved is not None
    assert newest.peak is not None
    assert newest.reserved > 2 * newest.peak


@pytest.mark.parametrize("program", [LONGER, BUFFERS], ids=["longer inputs", "longer buffers"])
def test_expandable_segments_fit_and_do_not_fragment(tmp_path: Path, program: str) -> None:
    run = trained(tmp_path, program, expandable=True)
    assert "device_fragmentation" not in found(run)
    (device,) = (event for event in run.events() if isinstance(event, Device))
    assert device.allocator == "expandable_segments:True"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_cache_that_is_used_again_is_no_fragmentation(tmp_path: Path, name: str) -> None:
    assert found(trained(tmp_path, HEALTHY[name])) == {}


def test_a_cache_of_expandable_segments_is_no_fragmentation(tmp_path: Path) -> None:
    assert found(trained(tmp_path, HEALTHY["a bounded cache"], expandable=True)) == {}


def test_garbage_that_holds_tensors_is_no_growth_of_the_device(tmp_path: Path) -> None:
    program = """
class Node: pass
for step in range(250):
    node = Node()
    node.itself, node.values = node, buffer(MIB)
    train(8, 64)
"""
    run = trained(tmp_path, program)
    levels = [event.devices[0].allocated for event in run.events() if isinstance(event, Batch)]
    assert max(level or 0 for level in levels) - (levels[0] or 0) > 20 * MIB
    assert found(run) == {}


@pytest.mark.parametrize("steps", [50, 250])
def test_old_garbage_that_holds_tensors_is_no_growth_of_the_device(
    tmp_path: Path, steps: int
) -> None:
    """Each step's cycle survives collections while it is in use; a short run ends before one frees it."""
    program = f"""
import gc
class Node: pass
for step in range({steps}):
    node = Node()
    node.itself, node.values = node, buffer(MIB)
    train(8, 64)
    gc.collect(1)
"""
    assert found(trained(tmp_path, program)) == {}


def test_graphs_that_pile_up_are_pools_and_no_fragmentation(tmp_path: Path) -> None:
    run = trained(tmp_path, CAPTURES)
    findings = found(run)
    assert "device_fragmentation" not in findings
    assert findings["graph_pools"].where == "cuda0"
    document = shown(tmp_path)
    assert document["metrics"]["memory/cuda0/private_pools_mib"]["last"] > 1000


FULL = """
train(8, 64)
for step in range(60):
    large = buffer((800 + step) * MIB)
    del large
    train(8, 64)
"""


@pytest.mark.parametrize(
    ("program", "reason", "remedy"),
    [
        (FULL, "memory is full", "smaller batch"),
        (BUFFERS, "free memory is in pieces", "expandable_segments:True"),
    ],
    ids=["full", "in pieces"],
)
def test_retries_are_found_with_their_reason(
    tmp_path: Path, program: str, reason: str, remedy: str
) -> None:
    memory = "1GiB" if program is FULL else "1500MiB"
    finding = found(trained(tmp_path, program, memory=memory))["allocator_retries"]
    assert reason in finding.title
    assert remedy in (finding.remedy or "")
    assert shown(tmp_path)["metrics"]["memory/cuda0/retries"]["last"] >= 5


def test_a_program_that_fits_has_no_series_about_retries(tmp_path: Path) -> None:
    trained(tmp_path, "for step in range(30): train(8, 64)")
    names = shown(tmp_path)["metrics"].keys()
    assert "memory/cuda0/reserved_mib" in names
    assert not names & {f"memory/cuda0/{name}" for name in ("retries", "ooms", "private_pools_mib")}


def test_failed_allocations_that_the_program_catches_are_counted_and_no_retries(
    tmp_path: Path,
) -> None:
    program = """
for step in range(40):
    try:
        buffer(2000 * MIB)
    except torch.OutOfMemoryError:
        pass
    train(8, 64)
"""
    run = trained(tmp_path, program, memory="1GiB")
    assert "allocator_retries" not in found(run)
    assert shown(tmp_path)["metrics"]["memory/cuda0/ooms"]["last"] == 40
