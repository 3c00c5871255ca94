"""Hearing of storages that Python resizes, which no dispatch mode sees.

FSDP frees gathered parameters with ``storage.resize_(0)``. While somebody listens, the method is replaced by
one that calls it and tells; afterwards it is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_Listener = Callable[[Any], None]

_listeners: list[_Listener] = []
_lock = threading.Lock()


def subscribe(listener: _Listener) -> None:
    """From now on ``listener`` is called with each storage that was resized."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[assignment,method-assign] # see the module


def unsubscribe(listener: _Listener) -> None:
    """No longer. Calling it again is harmless."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners and torch.UntypedStorage.__dict__.get("resize_") is _resize_and_tell:
            del torch.UntypedStorage.resize_  # the method that it inherits shows again


def _resize_and_tell(storage: Any, *args: Any, **kwargs: Any) -> Any:
    result = torch._C.StorageBase.resize_(storage, *args, **kwargs)  # type: ignore[attr-defined]
    for listener in _listeners.copy():
        listener(storage)
    return result
