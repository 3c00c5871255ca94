"""Estimates of whole trainings, beside torch's own allocator after each of their first steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memlog
from benchmarks.estimates import on_device
from benchmarks.estimates.models import Case, cases
from memlog.estimates.caching_allocator import CachingAllocator
from memlog.estimates.cuda_kernels.reductions import Gpu
from memlog.estimates.device_memory import workspace_size

pytestmark = pytest.mark.cuda
MIB = 1024**2
SAMPLE = [
    ("MLP", "AdamW", "float32", False),
    ("MLP", "SGD", "bfloat16 autocast", True),
    ("MLP", "Adafactor", "checkpointing", False),
    ("UNet", "AdamW", "bfloat16 autocast", False),
    ("transformer encoder", "SGD", "checkpointing", False),
    ("graph network", "Adafactor", "bfloat16 autocast", False),
    ("transformers GPT2LMHeadModel", "AdamW", "bfloat16 autocast", True),
    ("transformers LlamaForCausalLM", "SGD, momentum", "checkpointing", False),
    ("transformers BertModel", "Adafactor", "float32", True),
    ("transformers ConvNextModel", "SGD, momentum", "checkpointing", False),
]


@pytest.fixture(autouse=True)
def _default_segments() -> Iterator[None]:
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(("name", "optimizer", "mode", "expandable"), SAMPLE)
def test_peak_and_reserved_are_the_allocators(
    name: str, optimizer: str, mode: str, expandable: bool
) -> None:
    case = next(one for one in cases() if one.name == name)
    found = on_device.compared(case, case.model(), optimizer, mode, "cuda", expandable=expandable)
    assert abs(found.peak_error) < 0.005
    assert abs(found.reserved_error) < 0.01


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


def peaks(
    step: Callable[..., None], make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the real and the estimated peaks of allocated and reserved bytes, after each step."""
    real = on_device.run(layers(), make, step)
    found = memlog.estimate(step, model=layers, optimizer=make)
    allocator = CachingAllocator()
    assert found._replay is not None
    estimated = [
        (allocator.most_allocated, allocator.most_reserved) for _ in found._replay.steps(allocator)
    ]
    return real, estimated


def keeps_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(1024, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def clears_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(1024, 512, device="cuda")).square().mean().backward()
    optimizer.step()


kept: list[torch.Tensor] = []


def keeps_a_result(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    out = model(torch.randn(4096, 512, device="cuda"))
    out.square().mean().backward()
    kept[:] = [out.detach()]
    optimizer.step()
    optimizer.zero_grad()


def without_lists(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("step", [keeps_gradients, clears_first, keeps_a_result])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, without_lists, fused])
def test_each_step_needs_what_the_estimate_says(
    step: Callable[..., None], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    real, estimated = peaks(step, make)
    kept.clear()
    for (allocated, reserved), (guess, guess_reserved) in zip(real, estimated, strict=True):
        assert guess == pytest.approx(allocated, rel=0.001)
        assert guess_reserved == reserved


def test_workspaces_of_cublas_are_counted_once_for_each_thread() -> None:
    case = Case("", layers, lambda batch: torch.randn(batch, 512), lambda model, x: model(x).sum())
    found = memlog.estimate(lambda model: case.loss(model, case.batch(64)).backward(), model=layers)
    device: Any = torch.cuda.get_device_properties(0)
    gpu = Gpu("", (device.major, device.minor), device.multi_processor_count)
    assert workspace_size(gpu) == torch._C._cuda_getCublasWorkspaceSize()
    assert found.categories["workspaces"] == 2 * workspace_size(gpu)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    model = layers().cuda()
    before = torch.cuda.memory_allocated()
    case.loss(model, torch.randn(64, 512, device="cuda")).backward()
    del model
    gc.collect()
    left = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert left - torch.cuda.memory_allocated() == found.categories["workspaces"] < before + left


def test_several_optimizers_are_as_on_the_device() -> None:
    """Two networks, as of a GAN, each with its optimizer."""

    def compete(model: nn.Module, optimizer: Any) -> None:
        maker, judge = model
        made = maker(torch.randn(1024, 512, device="cuda"))
        for each, judged in zip(optimizer, (made.detach(), made), strict=True):
            each.zero_grad()
            judge(judged).square().mean().backward()
            each.step()

    def both() -> nn.Module:
        return nn.ModuleList([layers(), layers()])

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model[1].parameters()), torch.optim.AdamW(model[0].parameters())]

    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = both().to("cuda")
    made = optimizers(model)
    for _ in range(3):
        compete(model, made)
    real = torch.cuda.max_memory_allocated() - before
    model = both()
    assert memlog.estimate(compete, model=model, optimizer=optimizers(model)).peak == real
