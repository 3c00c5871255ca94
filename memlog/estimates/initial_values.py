"""Initial values of fake parameters. torch draws some values again until all of them fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init

from memlog.estimates.several_processes import part_of


@contextmanager
def any_initial_values() -> Iterator[None]:
    """Let ``torch.nn.init.trunc_normal_`` leave fake tensors as they are inside the block."""
    draw = init._no_grad_trunc_normal_

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(part_of(tensor), FakeTensor):
            return tensor
        return draw(tensor, *args, **kwargs)

    with patch.object(init, "_no_grad_trunc_normal_", fill):
        yield
