"""Data loaders in an estimate: the indices of samples are real, the samples are fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader


@contextmanager
def real_indices() -> Iterator[None]:
    """Let data loaders draw real seeds and indices inside the block, because they decide by their values."""
    kind = dataloader._BaseDataLoaderIter
    with (
        patch.object(kind, "_next_index", _without_modes(kind._next_index)),
        patch.object(
            dataloader.DataLoader, "__iter__", _without_modes(dataloader.DataLoader.__iter__)
        ),
    ):
        yield


def _without_modes(draw: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any) -> Any:
        with _disable_current_modes():
            return draw(*args)

    return outside
