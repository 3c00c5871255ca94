"""Hearing of storages that Python resizes, which no dispatch mode sees.

FSDP frees gathered parameters with ``storage.resize_(0)``. While somebody listens, the method is replaced by
one that calls it and tells; afterwards it is as it was.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from memlog import forks

_Listener = Callable[[Any], None]

_listeners: list[_Listener] = []
_lock = threading.Lock()
forks.renew(sys.modules[__name__], "_lock", threading.Lock)
_NAME = "resize_"


class _Patch:
    """Where ours is, and what was there before: it may be another's, and another's may come on top of it."""

    def __init__(self) -> None:
        self.on = False
        self.before: Any = None

    def apply(self) -> None:
        if not self.on:
            self.before = vars(torch.UntypedStorage).get(_NAME)
            setattr(torch.UntypedStorage, _NAME, _resize_and_tell)
            self.on = True

    def undo(self) -> None:
        """As it was; where another's lies on top ours stays below it and tells nobody."""
        if not self.on or vars(torch.UntypedStorage).get(_NAME) is not _resize_and_tell:
            return
        if self.before is None:
            delattr(torch.UntypedStorage, _NAME)  # the method that it inherits shows again
        else:
            setattr(torch.UntypedStorage, _NAME, self.before)
        self.on, self.before = False, None


_patch = _Patch()


def subscribe(listener: _Listener) -> None:
    """From now on ``listener`` is called with each storage that was resized."""
    with _lock:
        _listeners.append(listener)
        _patch.apply()


def unsubscribe(listener: _Listener) -> None:
    """No longer. Calling it again is harmless."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            _patch.undo()


def _resize_and_tell(storage: Any, *args: Any, **kwargs: Any) -> Any:
    resize = _patch.before or torch._C.StorageBase.resize_  # type: ignore[attr-defined]
    result = resize(storage, *args, **kwargs)
    for listener in _listeners.copy():
        listener(storage)
    return result
