"""Check that no part of a tracer is left in torch."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils import _python_dispatch


def hooks() -> int:
    """Return the number of hooks in torch, of every kind that a tracer can install."""
    return sum(
        map(
            len,
            (
                torch_modules._global_forward_pre_hooks,
                torch_modules._global_forward_hooks,
                torch_modules._global_forward_hooks_always_called,
                torch_modules._global_backward_hooks,
                torch_optimizers._global_optimizer_pre_hooks,
                torch_optimizers._global_optimizer_post_hooks,
            ),
        )
    )


def clean() -> bool:
    return (
        hooks() == 0
        and _python_dispatch._get_current_dispatch_mode_stack() == []
        and not _python_dispatch._is_in_torch_dispatch_mode
        and "resize_" not in torch.UntypedStorage.__dict__
        and torch.get_rng_state is torch.random.get_rng_state
    )


@pytest.fixture
def nothing_stays_behind() -> Iterator[None]:
    assert clean()
    yield
    assert clean()
