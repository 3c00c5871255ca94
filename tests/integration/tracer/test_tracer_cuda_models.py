"""The native engine on generated models: its totals are the allocator's, its layers are the CPU engine's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.models import GPT, text

from memlog import MemoryTracer

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda

CHECKS = """
    import itertools
    import json
    import sys
    import warnings

    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from memlog import MemoryTracer

    warnings.simplefilter("ignore")
    HOPPER = torch.cuda.get_device_capability() >= (9, 0)

    def sequential():
        return nn.Sequential(*(
            layer
            for _ in range(3)
            for layer in (nn.Linear(192, 192), nn.LayerNorm(192), nn.ReLU(inplace=True))
        )), (64, 192)

    def transformer():
        return nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), (4, 48, 128)

    class Branches(nn.Module):
        # Views, tensors that are used twice, parameters that are shared or frozen, a module used twice.
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)
            self.frozen = nn.Linear(96, 96).requires_grad_(False)
            self.second.weight = self.first.weight

        def forward(self, batch):
            left, right = self.first(batch).chunk(2, dim=-1)
            both = torch.cat([right, left.mul(2).add_(1)], dim=-1)
            return self.first(self.frozen(both) + self.second(both).view_as(both))

    def branches():
        return Branches(), (128, 96)

    def convolutions():
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2), nn.Flatten(), nn.LazyLinear(10),
        ), (8, 3, 32, 32)

    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 160)) for _ in range(3)
            )
            self.reentrant = reentrant

        def forward(self, batch):
            for block in self.blocks:
                batch = checkpoint(block, batch, use_reentrant=self.reentrant)
            return batch

    def reentrant():
        return Checkpointed(True), (64, 160)

    def not_reentrant():
        return Checkpointed(False), (64, 160)

    class WithLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return self.model(batch).float().square().mean()

    MODELS = [sequential, transformer, branches, convolutions, reentrant, not_reentrant]
    OPTIMIZERS = {
        "SGD": lambda p: [torch.optim.SGD(p, 0.01, momentum=0.9)],
        "Adam": lambda p: [torch.optim.Adam(p)],
        "fused": lambda p: [torch.optim.AdamW(p, fused=True)],
        "one by one": lambda p: [torch.optim.AdamW(p, foreach=False)],
        "capturable": lambda p: [torch.optim.Adam(p, capturable=True)],
        "two": lambda p: [torch.optim.Adam(p[::2]), torch.optim.SGD(p[1::2], 0.1, momentum=0.5)],
        "Adafactor": lambda p: [torch.optim.Adafactor(p)],
    }

    def rounded(tensors):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(-(-size // 512) * 512 for size in storages.values())

    def check(make, optimizers, autocast, accumulate, fresh):
        model, shape = make()
        model = WithLoss(model).cuda()
        batch = torch.ones(shape, device="cuda", requires_grad=make is reentrant)
        model(batch)
        parameters = [one for one in model.parameters() if one.requires_grad]
        made = OPTIMIZERS[optimizers](parameters)
        half = torch.autocast("cuda", torch.bfloat16, enabled=autocast)

        def step():
            for _ in range(accumulate):
                with half:
                    loss = model(batch)
                loss.backward()
            for optimizer in made:
                optimizer.step()

        if not fresh:
            step()
            for optimizer in made:
                optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        tracer = MemoryTracer()
        with tracer.trace(model):
            step()
        stats, result = torch.cuda.memory_stats(), tracer.result
        whole = [one for one in model.parameters()]
        state = [
            value
            for optimizer in made
            for values in optimizer.state.values()
            for value in values.values()
            if torch.is_tensor(value) and value.is_cuda
        ]
        case = [make.__name__, optimizers, autocast, accumulate, fresh]
        size, held = torch._C._cuda_getCublasWorkspaceSize(), result.categories.get("workspaces", 0)
        return {
            "case": case,
            "exact": [result.engine, result.exactness],
            "peak": stats["allocated_bytes.all.peak"] - result.peak,
            "end": stats["allocated_bytes.all.current"] - result.end,
            "sum": sum(share.size for share in result.shares) - result.peak,
            "categories": sum(result.categories.values()) - result.peak,
            "parameters": result.categories.get("parameters", 0) - rounded(whole),
            "state": fresh or result.categories.get("optimizer state", 0) - rounded(state),
            "workspaces": held % size,
            "attributed": result.attributed >= 0.9,
            "missing": result.dropped,
            "faults": dict(tracer.health.faults),
        }

    cases = itertools.product(MODELS, OPTIMIZERS, (False, True), (1, 2), (False, True))
    chosen = list(cases)[int(sys.argv[1])::int(sys.argv[2])]
    for case in chosen:
        if case[0] is transformer and case[2] and HOPPER:
            continue  # the simulated device has no plan for cuDNN's attention
        print(json.dumps(check(*case)))
"""

RIGHT = {
    "exact": ["native", "exact"],
    "peak": 0,
    "end": 0,
    "sum": 0,
    "categories": 0,
    "parameters": 0,
    "workspaces": 0,
    "attributed": True,
    "missing": {},
    "faults": {},
}


@pytest.mark.parametrize(
    ("memory", "capability", "number"),
    [
        ("default", "8.0", 0),
        ("expandable", "8.0", 3),
        ("default", "9.0", 6),
        ("expandable", "9.0", 9),
    ],
)
def test_totals_are_the_allocators_own(
    memory: str, capability: str, number: int, tmp_path: Path
) -> None:
    """Each setting gets other combinations of model, optimizer, autocast and accumulation."""
    settings = {"FAKE_CUDA_CAPABILITY": capability}
    if memory == "expandable":
        settings["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    process = child.start(CHECKS, tmp_path, str(number), "11", fork=False, **settings)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) >= 12
    wrong = [
        (one["case"], name, one[name])
        for one in found
        for name, right in RIGHT.items()
        if one[name] != right
    ]
    assert wrong == []
    assert [one["case"] for one in found if one["state"] not in (True, 0)] == []


def language_model_step(device: str) -> tuple[Any, Callable[[], None]]:
    """Return a model, and a step of it with a loss outside the model in two batches."""
    torch.manual_seed(0)
    model = GPT(64, 1, words=2000).to(device)
    words = text(16, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(2):
            scores = model(words)
            torch.nn.functional.cross_entropy(scores.view(-1, 2000), words.view(-1)).backward()
            del scores
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def traces(device: str, count: int = 1) -> Iterator[Any]:
    model, step = language_model_step(device)
    step()
    for _ in range(count):
        tracer = MemoryTracer()
        with tracer.trace(model):
            step()
        assert not tracer.health.faults
        yield tracer


def test_layers_are_as_on_the_cpu() -> None:
    """On a device the backward pass runs on another thread, and no hook tells when it ends."""
    [expected], [found] = traces("cpu"), traces("cuda:0")
    for layer in expected.result.layers[1:]:
        other = found.get_layer_figures(layer.path)
        for mine in layer.phases:
            phase = other.phase(mine.phase)
            assert phase.kept == pytest.approx(mine.kept, rel=0.01, abs=8192), layer.path
            if mine.phase == "forward":
                assert phase.calls == mine.calls
                assert phase.allocated == pytest.approx(mine.allocated, rel=0.02, abs=32_768)
    words = found.get_layer_figures("words")
    assert words.added == expected.get_layer_figures("words").added


def test_the_losss_memory_is_not_a_layers() -> None:
    """Autograd's thread computes gradients of the loss before any hook tells it a layer."""
    [found] = traces("cuda:0")
    logits = 16 * 64 * 2000 * 4
    assert found.result.unattributed["backward"] == pytest.approx(4 * logits, rel=0.01)
    assert found.result.unattributed["forward"] == pytest.approx(2 * logits, rel=0.01)
    of_loss = [
        (share.phase, share.category)
        for share in found.result.shares
        if share.path == "(outside modules)" and share.size >= logits
    ]
    assert ("backward", "temporaries") in of_loss


def test_a_second_trace_is_like_the_first() -> None:
    """Notes of an earlier trace stay on autograd's threads, where no later hook of that trace runs."""
    first, *later = [
        (
            tracer.result.peak,
            tracer.result.categories,
            tracer.result.shares,
            [(layer.path, layer.allocated, layer.added) for layer in tracer.result.layers],
            tracer.result.dropped,
        )
        for tracer in traces("cuda:0", 3)
    ]
    assert later == [first, first]
