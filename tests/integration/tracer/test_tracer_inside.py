"""Torch's own use of modes inside a traced block: the outcome is the same as without the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._python_dispatch import TorchDispatchMode

from memlog import MemoryTracer
from memlog.torchside import internals
from memlog.tracer.engines import dispatch_mode

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("nothing_compiled"),
    # torch's compiler uses functions that torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

OLD_COND = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch's cond has no backward pass below a dispatch mode, whosever it is",
)

MODES = (dispatch_mode.ObservingMode, dispatch_mode.UncompiledMode)
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def cond() -> Tensor:
    x = X.clone().requires_grad_()
    torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum().backward()
    assert x.grad is not None
    return x.grad


def loop() -> Tensor:
    out: Tensor = while_loop(  # type: ignore[no-untyped-call] # torch leaves it without types
        lambda i, _y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), X.clone())
    )[1]
    return out


def scanned() -> Tensor:
    out: Tensor = scan(lambda carry, y: (carry + y, carry * 1.0), torch.zeros(8), X)[0]
    return out


def attention() -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = X.reshape(1, 1, 4, 8)
    out: Tensor = flex_attention(heads, heads, heads)
    return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("work", [pytest.param(cond, marks=OLD_COND), loop, scanned, attention])
def test_operators_of_a_higher_order_do_what_they_do(work: Callable[[], Tensor]) -> None:
    bare = work()
    tracer = MemoryTracer()
    with tracer.trace(torch.nn.Identity()):
        traced = work()
    assert torch.equal(bare, traced)
    assert tracer.result.engine == "dispatch"


@OLD_COND
def test_a_torch_without_the_flag_is_named_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_mode.ObservingMode, "supports_higher_order_operators", False)
    with pytest.raises(NotImplementedError), MemoryTracer().trace(torch.nn.Identity()):
        cond()
    tables = [one.python_key_table for one in torch._ops._higher_order_ops.values()]
    try:
        for kind in MODES:
            internals.allow_higher_order_ops(kind)
        with MemoryTracer().trace(torch.nn.Identity()):
            assert torch.equal(cond(), X.cos() if X.sum() > 0 else -X.sin())
    finally:
        for table in tables:
            for kind in MODES:
                table.pop(kind, None)
