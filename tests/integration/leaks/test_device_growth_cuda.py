"""What memlog says about the growth of a device's memory in real programs: leaks, and steps that grow."""

from pathlib import Path

import pytest
from support import child

from memlog.events import Finding
from memlog.journal import list_runs
from memlog.reports import summarize

pytestmark = pytest.mark.cuda

AT_MOST = 180
"""Maximum seconds that a program runs, also on a busy machine."""

PROGRAM = """
import torch
from torch import nn
import memlog

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5000, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 5000)
    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))
def network(layers, width=512):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts).cuda()
memlog.init("local")
"""
TRAIN = """
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LONGER_INPUTS = (
    """
model = Reader().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(200):
    tokens = torch.randint(0, 5000, (8, 32 + step), device="cuda")
    out = model(tokens)
    loss = out.square().mean()
"""
    + TRAIN
)
LARGER_BATCHES = (
    """
model = network(4, 2048)
optimizer = torch.optim.Adam(model.parameters())
for step in range(150):
    inputs = torch.randn(256 * (1 + step // 10), 2048, device="cuda")
    loss = model(inputs).square().mean()
"""
    + TRAIN
)
UNFROZEN = (
    """
model = network(12)
model.requires_grad_(False)
layers = [part for part in model if isinstance(part, nn.Linear)][::-1]
optimizer = torch.optim.Adam(model.parameters())
for step in range(160):
    if step % 12 == 0 and step // 12 < len(layers):
        layers[step // 12].requires_grad_(True)
    loss = model(torch.randn(64, 512, device="cuda")).square().mean()
"""
    + TRAIN
)
BOTH = (
    """
model = network(2)
optimizer = torch.optim.Adam(model.parameters())
log, leaked = [], []
for step in range(260):
    log.append(bytes(200 * 1024))
    leaked.append(torch.empty(2**20, dtype=torch.uint8, device="cuda"))
    loss = model(torch.randn(8, 512, device="cuda")).square().mean()
"""
    + TRAIN
)

EVALUATIONS = (
    """
model = network(2)
optimizer = torch.optim.Adam(model.parameters())
history, latest = [], []
def evaluate(kept):
    with torch.no_grad():
        kept.extend(model(torch.randn(2048, 512, device="cuda")) for _ in range(4))
    del latest[:-8]
for step in range(360):
    if step % 30 == 29:
        evaluate({kept})
    loss = model(torch.randn(8, 512, device="cuda")).square().mean()
"""
    + TRAIN
)


def run(directory: Path, program: str) -> tuple[str, list[Finding]]:
    # The device's memory is not written, so that it does not grow in the process's memory as well.
    child.run(PROGRAM + program, directory, timeout=AT_MOST, FAKE_CUDA_COPY="4k")
    [found] = list_runs(directory / "memlog_runs")
    events = [event for event in found.events() if isinstance(event, Finding)]
    return summarize(found).verdict, events


@pytest.mark.parametrize(
    ("program", "follows"),
    [
        pytest.param(LONGER_INPUTS, "the sequence length (dimension 1 of `tokens`)", id="length"),
        pytest.param(LARGER_BATCHES, "dimension 0 of `inputs`", id="batch size"),
    ],
)
def test_steps_that_become_larger_are_no_leak(tmp_path: Path, program: str, follows: str) -> None:
    verdict, findings = run(tmp_path, program)
    assert verdict.startswith(f"The peak follows {follows}")
    assert {each.kind for each in findings} == {"larger_steps"}


def test_more_trained_layers_get_neither_a_false_cause_nor_an_all_clear(tmp_path: Path) -> None:
    verdict, findings = run(tmp_path, UNFROZEN)
    assert "No growth" not in verdict
    assert "cuda0" in verdict
    assert {each.kind for each in findings} <= {"growth"}, verdict


def test_each_holder_is_told_with_the_memory_that_it_makes_grow(tmp_path: Path) -> None:
    verdict, findings = run(tmp_path, BOTH)
    memories = {(each.where, each.memory) for each in findings if "list" in each.title}
    assert any(memory == "cuda0" for _, memory in memories), findings
    assert verdict.startswith("`leaked`, a list in `__main__`")
    assert "Memory grows by 1.0 MiB a step" in verdict


def test_what_evaluations_keep_on_a_device_is_named(tmp_path: Path) -> None:
    verdict, findings = run(tmp_path, EVALUATIONS.format(kept="history"))
    assert {(each.kind, each.memory) for each in findings} == {("kept_tensors", "cuda0")}, findings
    assert verdict.startswith("`history`, a list in `__main__`")
    assert "gains 4 tensors every 30 steps. That keeps 16.0 MiB each time." in verdict


def test_the_newest_evaluations_alone_are_no_leak(tmp_path: Path) -> None:
    verdict, findings = run(tmp_path, EVALUATIONS.format(kept="latest"))
    assert findings == []
    assert verdict.startswith("No growth"), verdict
