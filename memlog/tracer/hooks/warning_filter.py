"""Our global hooks cost the user no warning.

torch warns at every call of a compiled module while there are global hooks on modules; where warnings are
errors that ends training.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from memlog._internal import fork

_TEXT = r"Using `torch\.compile\(module\)` when there are global hooks"


class CompileWarningFilter:
    """No such warning from now on, until `end` has been called on every one of these."""

    def __init__(self) -> None:
        self._on = True
        _shared.acquire()

    def end(self) -> None:
        """Calling it again is harmless."""
        if self._on:
            self._on = False
            _shared.release()


class _Shared:
    """The process's one filter: equal ones are one to Python, whoever set them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._filter: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1 or self._filter not in warnings.filters[:1]:
                # What the user has set since comes first: ours goes in front again.
                warnings.filterwarnings("ignore", message=_TEXT)
                self._filter = warnings.filters[0] if warnings.filters else None

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # it is a list, whatever typeshed says
                with warnings.catch_warnings():
                    pass  # has Python forget what it has found by the filters of before


_shared = _Shared()
fork.renew(_shared, "_lock", threading.Lock)
