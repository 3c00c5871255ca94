"""Filter for a warning of torch that memlog's global hooks would cause.

torch warns at every call of a compiled module while there are global hooks on modules. If the user turns
warnings into errors, that ends training.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from memlog._internal import fork

_TEXT = r"Using `torch\.compile\(module\)` when there are global hooks"


class CompileWarningFilter:
    """Suppression of the warning until `end` has been called on every one of these objects."""

    def __init__(self) -> None:
        self._on = True
        _shared.acquire()

    def end(self) -> None:
        """Stop suppressing. A second call is harmless."""
        if self._on:
            self._on = False
            _shared.release()


class _Shared:
    """The process's only filter: Python treats equal filters as one, whoever set them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._filter: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1 or self._filter not in warnings.filters[:1]:
                # The user's newer filters come first, so put memlog's in front again.
                warnings.filterwarnings("ignore", message=_TEXT)
                self._filter = warnings.filters[0] if warnings.filters else None

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # typeshed is wrong: it is a list
                with warnings.catch_warnings():
                    pass  # makes Python drop what it has cached for the old filters


_shared = _Shared()
fork.renew(_shared, "_lock", threading.Lock)
