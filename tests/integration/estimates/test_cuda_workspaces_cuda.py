"""Buffers inside operations, as estimates compute them, compared with what torch's allocator allocates."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memlog
from memlog.estimates import cuda_workspaces
from memlog.estimates.cuda_kernels.reductions import Gpu
from memlog.estimates.gpus import of_this_machine

pytestmark = pytest.mark.cuda

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16)
LENGTHS = (1, 2, 3, 4, 7, 8, 16, 32, 63, 100, 128, 129, 300, 512, 768, 1000, 1024, 2048, 4096)
MOST_VALUES = 16_000_000
WORKSPACES = (8_519_680, 33_554_432)  # of cuBLAS, which stay allocated
CUDNN = "cuDNN computes this attention, and the simulated device has no plan for it"


class Compared(TorchDispatchMode):
    """Mode that runs each operation, and compares its buffers with the computed ones.

    Attributes:
        with_buffers: Number of operations that had buffers, all of which were as computed.
        different: Descriptions of the other operations.
    """

    def __init__(self) -> None:
        super().__init__()
        gpu = of_this_machine()
        assert gpu is not None
        self._gpu: Gpu = gpu
        self.with_buffers = 0
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", clear_history=True
        )
        out = func(*args, **kwargs)
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        found = cuda_workspaces.workspace(self._gpu, func, args, kwargs, out)
        real = buffers(history, out)
        computed = [] if found is None else [size for size in found.blocks or () if size]
        if real != computed:
            shapes = [tuple(one.shape) for one in tree_leaves(args) if isinstance(one, Tensor)]
            self.different.append(f"{func} {shapes}: {real}, computed {computed}")
        elif real:
            self.with_buffers += 1
        return out


def buffers(history: Iterable[dict[str, Any]], out: Any) -> list[int]:
    """Return the bytes allocated (positive) and freed (negative) in an operation, without its results."""
    results = {
        one.untyped_storage().data_ptr() for one in tree_leaves(out) if isinstance(one, Tensor)
    }
    events: list[tuple[int, int]] = []
    for event in history:
        if event["action"] == "alloc":
            events.append((event["addr"], event["size"]))
        elif event["action"] == "free_requested":
            events.append((event["addr"], -event["size"]))
    kept: set[int] = set()
    last = dict(events)
    for at, (address, size) in enumerate(events):
        stays = (
            last[address] > 0 and size > 0 and not any(a == address for a, _ in events[at + 1 :])
        )
        if stays and (address in results or size in WORKSPACES):
            kept.add(at)
    return [size for at, (_, size) in enumerate(events) if at not in kept]


def values(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=learned)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def check(*programs: Callable[[], object]) -> int:
    """Run programs, compare the buffers of each operation, and return how many operations had some."""
    mode = Compared()
    with mode:
        for program in programs:
            out = program()
            if isinstance(out, Tensor) and out.requires_grad:
                out.backward(torch.empty_like(out))
    assert not mode.different, "\n".join(mode.different)
    return mode.with_buffers


def any_tensor(choose: random.Random) -> Tensor:
    """Return a tensor of any shape, type and layout."""
    while True:
        shape = [choose.choice(LENGTHS) for _ in range(choose.randint(1, 4))]
        if torch.Size(shape).numel() <= MOST_VALUES:
            break
    dtype = choose.choice((*FLOATS, torch.float16, torch.float64))
    tensor = values(*shape, dtype=dtype, learned=False)
    if choose.random() < 0.5:
        tensor = tensor.permute(choose.sample(range(tensor.ndim), tensor.ndim))
    if choose.random() < 0.2 and tensor.shape[0] > 2:
        tensor = tensor[choose.randint(0, 1) :: choose.choice((1, 2))]
    return tensor


@pytest.mark.parametrize("seed", range(4))
def test_reductions_of_any_shape_type_and_layout(seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - chooses shapes
    found = 0
    for _ in range(60):
        tensor = any_tensor(choose)
        dims = choose.sample(range(tensor.ndim), choose.randint(1, tensor.ndim))
        reduce: Callable[[], object] = choose.choice(
            (
                lambda: tensor.sum(dims),  # noqa: B023 - is called in this iteration
                lambda: tensor.mean(dims),  # noqa: B023
                lambda: tensor.amax(dims),  # noqa: B023
                lambda: tensor.var(dims, correction=0),  # noqa: B023
                lambda: tensor.max(dims[0]),  # noqa: B023
                lambda: tensor.argmax(dims[0]),  # noqa: B023
                lambda: torch.linalg.vector_norm(tensor, 2, dims),  # noqa: B023
                lambda: (tensor > 0).sum(dims),  # noqa: B023
            )
        )
        found += check(reduce)
    assert found >= 10


def test_normalisations_and_softmax() -> None:
    programs = []
    for dtype in FLOATS:
        programs += [
            lambda dtype=dtype: F.softmax(values(64, 8, 256, 256, dtype=dtype), -1),
            lambda dtype=dtype: F.log_softmax(values(64, 50, 100, dtype=dtype).transpose(1, 2), 2),
            lambda dtype=dtype: F.layer_norm(
                values(64, 512, 100, dtype=dtype).transpose(1, 2),
                (512,),
                values(512, dtype=dtype),
                values(512, dtype=dtype),
            ),
            lambda dtype=dtype: F.group_norm(
                values(4, 64, 32, 32, dtype=dtype),
                32,
                values(64, dtype=dtype),
                values(64, dtype=dtype),
            ),
        ]
    channels = values(512), values(512)
    statistics = values(512, learned=False), values(512, learned=False)
    programs.append(lambda: F.batch_norm(values(2048, 512), *statistics, *channels, training=True))
    assert check(*programs) >= 10


def test_losses() -> None:
    images, target = (3, 128, 128), values(8, 3, 128, 128, learned=False)
    assert (
        check(
            lambda: F.mse_loss(values(8, *images), target),
            lambda: F.l1_loss(values(8, *images), target),
            lambda: F.smooth_l1_loss(values(8, *images), target),
            lambda: F.huber_loss(values(8, *images), target),
            lambda: F.binary_cross_entropy(values(8, *images), target),
            lambda: F.binary_cross_entropy_with_logits(values(8, *images), target),
            lambda: F.cross_entropy(values(8192, 500), indices(8192), label_smoothing=0.1),
            lambda: F.cross_entropy(values(8, 21, 64, 64), indices(8, 64, 64)),
        )
        >= 7
    )


@pytest.mark.parametrize(
    ("rows", "width", "count", "dtype"),
    [
        (50304, 96, 8192, torch.float32),
        (1000, 96, 8192, torch.float32),
        (1000, 256, 4096, torch.bfloat16),
        (500, 8, 1_000_000, torch.float32),
        (500, 8, 1_000_000, torch.bfloat16),
        (500, 64, 2000, torch.float32),
    ],
)
def test_derivatives_of_embeddings(rows: int, width: int, count: int, dtype: torch.dtype) -> None:
    table = values(rows, width, dtype=dtype)
    few = count <= 3072
    found = check(lambda: F.embedding(indices(count), table).sum())
    assert found >= (1 if few else 2)


def added(rows: int, columns: int, count: int) -> Tensor:
    to = values(rows, columns, learned=False)
    rows_added = values(count, columns, learned=False)
    return to.index_put_((indices(count),), rows_added, accumulate=True)


def test_chosen_rows_scans_and_sorts() -> None:
    assert (
        check(
            lambda: added(1000, 64, 5000),
            lambda: added(225, 12, 2401),
            lambda: torch.cumsum(values(1_000_000), 0),
            lambda: torch.cumsum(torch.ones(1000, 300, dtype=torch.bool, device="cuda"), 1),
            lambda: torch.sort(values(100))[0],
            lambda: torch.sort(values(100_000))[0],
        )
        >= 6
    )


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("size", [32, 64, 80, 128, 160, 256, 512])
def test_attention(dtype: torch.dtype, size: int) -> None:
    if dtype in HALF and torch.cuda.get_device_capability()[0] >= 9:
        pytest.skip(CUDNN)

    def attention(queries: int, keys: int, mask: bool, dropout: float) -> Tensor:
        query, key, value = (
            values(2, length, 4, size, dtype=dtype).transpose(1, 2)
            for length in (queries, keys, keys)
        )
        added = values(2, 4, queries, keys, dtype=dtype, learned=False) if mask else None
        return F.scaled_dot_product_attention(query, key, value, added, dropout)

    assert (
        check(
            partial(attention, 256, 256, mask=False, dropout=0.0),
            partial(attention, 100, 333, mask=False, dropout=0.1),
            partial(attention, 1000, 1000, mask=True, dropout=0.0),
            partial(attention, 130, 70, mask=True, dropout=0.1),
        )
        >= 4
    )


def test_operations_that_are_several_on_cuda() -> None:
    def bags() -> Tensor:
        return F.embedding_bag(indices(80, 100), values(5000, 64), mode="sum")

    assert (
        check(
            lambda: torch.logsumexp(values(20000, 64), 0),
            lambda: torch.count_nonzero(values(20000, 64), 0),
            lambda: torch.dist(values(2000, 1000), values(2000, 1000)),
            lambda: torch.roll(values(8, 56, 56, 96), (3, 3), (1, 2)),
            lambda: F.conv2d(values(8, 70, 56, 56)[:, :64], values(128, 64, 3, 3), values(128)),
            lambda: F.conv2d(values(8, 64, 28, 28), values(32, 64, 3, 3), values(32)),
            bags,
        )
        >= 8
    )


def test_norms_of_gradients() -> None:
    parameters = [nn.Parameter(values(*shape)) for shape in ((100,), (5000, 1000), (300, 300))]
    for one in parameters:
        one.grad = torch.empty_like(one)

    assert check(partial(nn.utils.clip_grad_norm_, parameters, 1.0)) >= 1


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.table(tokens)))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 8000))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(tokens[..., None].float().expand(-1, -1, 512))
        return out


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("made", [Gpt, Mlp])
def test_a_steps_peak_is_that_of_the_allocator(
    made: type[nn.Module], precision: torch.dtype
) -> None:
    if made is Gpt and precision in HALF and torch.cuda.get_device_capability()[0] >= 9:
        pytest.skip(CUDNN)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        tokens = torch.zeros(batch, 256, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", dtype=precision, enabled=precision in HALF):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    estimated = memlog.estimate(step, model=made, optimizer=torch.optim.AdamW, batch=16)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = made().cuda()
    trained = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, trained, 16)
    peak = torch.cuda.max_memory_allocated() - before
    assert estimated.gpu == torch.cuda.get_device_name()
    assert abs(estimated.peak - peak) <= 0.001 * peak
