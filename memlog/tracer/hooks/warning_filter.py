"""Filter for a warning of torch that memlog's global hooks would cause.

torch warns at every call of a compiled module while there are global hooks on modules. If the user turns
warnings into errors, the warning ends training.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from memlog.tracer.hooks.shared_hook import SharedHook

_TEXT = r"Using `torch\.compile\(module\)` when there are global hooks"


class _CompileWarningFilter(SharedHook[object]):
    """The process's only filter for the warning.

    All hooks share this filter, because Python keeps only one of several equal filters. If each
    hook added a filter, the first hook that removes its filter would remove the filter of all hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._filter: Any = None

    def add(self, holder: object) -> None:
        super().add(holder)
        with self._lock:
            if self._filter not in warnings.filters[:1]:
                self._install()  # the user's newer filters come first, so put memlog's in front again

    def _install(self) -> None:
        # `warnings.filterwarnings` would also make Python forget which of the program's warnings it has
        # printed already. Each would then be printed again.
        self._filter = ("ignore", re.compile(_TEXT, re.IGNORECASE), Warning, None, 0)
        warnings.filters.insert(0, self._filter)  # type: ignore[attr-defined] # typeshed is wrong: it is a list

    def _uninstall(self) -> None:
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # see above


COMPILE_WARNING_FILTER = _CompileWarningFilter()
