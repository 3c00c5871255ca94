"""Workspaces of operations, against the allocator's events."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.allocator import AllocatorTruth
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memlog import MemoryTracer
from memlog.tracer.engines import op_workspace

X = torch.linspace(-1, 1, 256 * 256).reshape(256, 256)
BATCH = torch.linspace(-1, 1, 4 * 32 * 64).reshape(4, 32, 64)


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.fixture(autouse=True)
def sparse_is_beta() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


OPERATIONS: dict[str, Callable[[], Any]] = {
    "boolean index": lambda: X[X > 0],
    "boolean assignment": lambda: X.clone().index_put_((X > 0,), torch.tensor(1.0)),
    "masked_select": lambda: X.masked_select(X > 0.5),
    "nonzero": (X > 0).nonzero,
    "kthvalue": lambda: X.kthvalue(3),
    "multinomial": lambda: X.abs().multinomial(10),
    "logsumexp": lambda: X.logsumexp(1),
    "bfloat16": lambda: X.bfloat16() @ X.bfloat16(),
    "complex": lambda: X.to(torch.cfloat) @ X.to(torch.cfloat).conj().T,
    "sparse rows": lambda: X.relu().to_sparse_csr() @ X,
    "strided": lambda: X[:, ::2] @ X[::2],
    "interpolate": lambda: functional.interpolate(X[None, None], scale_factor=2, mode="bicubic"),
    "histogram": X.histc,
    "unfold": lambda: functional.unfold(X[None, None], 3),
    "instance norm": lambda: functional.instance_norm(BATCH),
}


def agrees(work: Callable[[], Any], exactness: str = "exact") -> None:
    tracer = MemoryTracer()
    with torch.no_grad():
        work()
        with tracer.trace(nn.Identity()):
            result = work()
        del result
        with AllocatorTruth() as allocator:
            result = work()
        del result
    truth, found = allocator.result(), tracer.result
    assert found.peak - found.before == pytest.approx(truth.peak, rel=0.002)
    assert found.exactness == exactness


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_peak_of_an_operation_is_the_allocators(name: str) -> None:
    # Others on such tensors do take something that nobody measures, and which it was is not looked at.
    agrees(OPERATIONS[name], "lower bound" if name in ("complex", "sparse rows") else "exact")


def test_the_fast_path_of_a_transformer(encoder: nn.Module) -> None:
    agrees(lambda: encoder(BATCH))


def test_what_the_values_decide_is_measured_at_every_call() -> None:
    few, many = X > 0.9, X > -0.9
    agrees(lambda: X[few])
    agrees(lambda: X[many])
    agrees(lambda: X[few])


def test_an_operation_of_the_programs_own_makes_no_exact_peak() -> None:
    library = torch.library.Library("memlog_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: (x + 1) * 2 - 2, "CPU")
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        out = torch.ops.memlog_tests.twice(X)
    assert out.shape == X.shape
    assert tracer.result.exactness == "lower bound"
    assert any("memlog_tests.twice" in sentence for sentence in tracer.result.unseen)


class StopsTheProfiler(TorchDispatchMode):
    """A mode of the program that ends torch's legacy profiler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.logsumexp.default:
            with suppress(RuntimeError):  # in a call that is not measured
                torch._C._autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
        return out


def test_a_profiler_that_the_program_stops_makes_no_exact_peak() -> None:
    tracer = MemoryTracer()
    with torch.no_grad(), StopsTheProfiler(), tracer.trace(nn.Identity()):
        X[:100].logsumexp(1)
    assert tracer.result is not None
    assert tracer.result.exactness != "exact"
    assert gc.isenabled()


def test_what_a_garbage_collection_frees_meanwhile_is_no_part_of_an_operation() -> None:
    made = [[op_workspace.allocations(torch.ones, (64, 64), {})[0]]]

    def operation() -> list[list[Any]]:
        garbage = made.pop()
        garbage.append(garbage)
        del garbage
        return [[] for _ in range(100_000)]  # enough objects for a collection

    _, sizes = op_workspace.allocations(operation, (), {})
    assert sizes == []
    assert gc.isenabled()


@pytest.mark.skipif(
    not torch.Generator.__weakrefoffset__, reason="this torch's generators can't be watched"
)
def test_generators_are_not_kept() -> None:
    import weakref

    generator = torch.Generator()
    gone = weakref.ref(generator)
    with MemoryTracer().trace(nn.Identity()):
        X.abs().multinomial(3, generator=generator)
    del generator
    assert gone() is None
