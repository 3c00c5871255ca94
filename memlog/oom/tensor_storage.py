"""Tensors in values, and the device, address and size of their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memlog._internal.inert_access import is_kind


def tensors_in(
    torch: Any,
    value: object,
    inside: Callable[[object], Iterable[object]],
    *,
    depth: int,
    most: int,
) -> Iterator[Any]:
    """Yield the tensors in a value: the value itself, or those inside it at any level up to ``depth``.

    ``inside`` returns the values directly inside a value. At most ``most`` values are looked at, level by
    level.
    """
    waiting, looked_at = deque([(value, 0)]), 0
    while waiting and looked_at < most:
        one, level = waiting.popleft()
        looked_at += 1
        if is_kind(one, torch.Tensor):
            yield one
        elif level < depth:
            waiting += [(each, level + 1) for each in inside(one)]


def sizes_of(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address. Tensors that share a storage count once."""
    return {address(each): size(each) for each in tensors}


def is_on(tensor: Any, device: int) -> bool:
    """Return True if a tensor is on the CUDA device with an index."""
    return bool(tensor.device.type == "cuda" and tensor.device.index == device)


def size(tensor: Any) -> int:
    """Return the bytes of a tensor's storage, which other tensors may share."""
    return int(_plain(tensor).untyped_storage().nbytes())


def address(tensor: Any) -> int:
    """Return the address of a tensor's storage."""
    return int(_plain(tensor).untyped_storage().data_ptr())


def _plain(tensor: Any) -> Any:
    """Return the part of a DTensor that is on this device; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
