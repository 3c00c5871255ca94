"""The kernel of attention that estimates assume, beside torch's own choice for the same tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support import child
from support.devices import simulated
from torch import Tensor

from memlog.estimates.cuda_kernels.attention import Attention, AttentionKernel, chosen
from memlog.estimates.gpus import of_this_machine

pytestmark = pytest.mark.cuda

NUMBERS = {
    AttentionKernel.MATH: 0,
    AttentionKernel.FLASH: 1,
    AttentionKernel.EFFICIENT: 2,
    AttentionKernel.CUDNN: 3,
}
"""Numbers of ``torch.nn.attention.SDPBackend``."""
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEADS = (1, 4, 8, 12, 20, 32, 64, 96, 128, 192, 200, 224, 240, 256, 264)
CALLS = 400


def values(choose: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of four dimensions in any layout, which is learned or not."""
    one, two, three, four = shape
    learned = choose.random() < 0.5

    def empty(*sides: int) -> Tensor:
        return torch.empty(sides, dtype=dtype, device="cuda", requires_grad=learned)

    layout = choose.choice(("plain", "plain", "heads inside", "columns", "shifted"))
    if layout == "heads inside":
        return empty(one, three, two, four).transpose(1, 2)
    if layout == "columns":
        return empty(one, two, four, three).transpose(2, 3)
    if layout == "shifted":
        return empty(one * two * three * four + 1)[1:].view(shape)
    return empty(*shape)


def mask(choose: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    samples, heads, rows, columns = shape
    learned = choose.random() < 0.5

    def empty(*sides: int) -> Tensor:
        return torch.empty(sides, dtype=dtype, device="cuda", requires_grad=learned)

    kinds: tuple[Callable[[], Tensor | None], ...] = (
        lambda: None,
        lambda: empty(rows, columns),
        lambda: empty(rows, columns, heads).permute(2, 0, 1)[None],  # embeddings of distances
        lambda: empty(*shape),
        lambda: torch.empty(rows, columns, dtype=torch.bool, device="cuda"),
        lambda: empty(samples, 1, 1, columns),
        lambda: empty(samples, 1, rows, 1).expand(-1, -1, -1, columns),
        lambda: empty(heads, rows, columns),
    )
    return choose.choice(kinds)()


def any_call(choose: random.Random) -> Attention:
    dtype = choose.choice(TYPES)
    samples, heads = choose.choice((1, 2)), choose.choice((1, 2, 4))
    of_keys = choose.choice((heads, heads, 1, 2))
    of_values = choose.choice((of_keys, of_keys, of_keys, 1))
    rows = choose.choice((1, 2, 7, 64))
    columns = choose.choice((rows, rows, 1, 130))
    size = choose.choice(HEADS)
    value_size = choose.choice((size, size, size, 128))
    causal = choose.random() < 0.3
    query = values(choose, (samples, heads, rows, size), dtype)
    key = values(choose, (samples, of_keys, columns, size), dtype)
    value = values(choose, (samples, of_values, columns, value_size), dtype)
    added = None if causal else mask(choose, (samples, heads, rows, columns), dtype)
    dropout = choose.choice((0.0, 0.0, 0.1, 0.125))
    return Attention(query, key, value, added, dropout, causal, choose.random() < 0.4)


def differences(seed: int) -> list[str]:
    gpu = of_this_machine()
    assert gpu is not None
    choose = random.Random(seed)  # noqa: S311 - chooses shapes
    found = []
    for _ in range(CALLS):
        call = any_call(choose)
        *tensors, dropout, causal, grouped = call
        by_torch = torch._fused_sdp_choice(*tensors, dropout, causal, enable_gqa=grouped)
        ours = chosen(gpu, call)
        if NUMBERS[ours] != by_torch:
            shapes = [each if each is None else (each.shape, each.stride()) for each in tensors]
            found.append(f"{ours}, torch {by_torch}: {shapes} {call.query.dtype} {call[4:]}")
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_is_torchs_choice(seed: int) -> None:
    torch.cuda.init()
    assert not differences(seed)


SCRIPT = f"""
import json, sys, torch
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]}
import test_attention_kernels_cuda as tests

torch.cuda.init()
print(json.dumps(tests.differences(7)))
"""


@pytest.mark.parametrize("capability", ["7.5", "8.6", "9.0", "10.0", "12.0"])
def test_the_kernel_is_torchs_choice_on_other_gpus(capability: str, tmp_path: Path) -> None:
    if not simulated():
        pytest.skip("a real GPU has one capability")
    program = child.start(SCRIPT, tmp_path, fork=False, FAKE_CUDA_CAPABILITY=capability)
    output, errors = program.communicate(timeout=120)
    assert not errors
    assert json.loads(output) == []
