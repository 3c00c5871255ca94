"""Failed allocations that a search for the largest batch size catches.

Accelerate's ``find_executable_batch_size`` and Lightning's batch size finder ask a function of theirs whether
an error is a failed allocation. While a session runs, memlog replaces this function by one that passes the
call on, and then notes the failure and the batch size that the search tried.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.replacements import Replacements

_LIGHTNING = ("is_oom_error", "new_size")
_FINDERS = {
    "accelerate.utils.memory": ("should_reduce_batch_size", "batch_size"),
    "lightning.pytorch.tuner.batch_size_scaling": _LIGHTNING,
    "pytorch_lightning.tuner.batch_size_scaling": _LIGHTNING,
}
"""Modules, their functions, and the caller's variable that holds the batch size."""


class BatchSizeFinders:
    """Replacements of the libraries' functions from `begin` to `stop`.

    ``caught`` is called with each failed allocation and the batch size; ``None``: the size is unknown.
    """

    def __init__(
        self, caught: Callable[[BaseException, int | None], None], diagnostics: Diagnostics
    ) -> None:
        self._caught = caught
        self._diagnostics = diagnostics
        self._replaced = Replacements()

    def begin(self) -> None:
        """Replace the functions as soon as their modules are imported."""
        self._replaced.when_imported(_FINDERS, self._imported)

    def stop(self) -> None:
        """Restore the functions, unless another package has replaced them later."""
        self._replaced.undo()

    def _imported(self, module: Any) -> None:
        with self._diagnostics.contained("noticing searches for a batch size"):
            name, variable = _FINDERS[module.__name__]
            original = getattr(module, name)

            @functools.wraps(original)
            def asking(error: BaseException, *args: Any, **kwargs: Any) -> Any:
                found = original(error, *args, **kwargs)
                if found and self._replaced:
                    with self._diagnostics.contained("noting a failed allocation"):
                        size = sys._getframe(1).f_locals.get(variable)  # noqa: SLF001 - inspect's is the same
                        self._caught(error, size if type(size) is int else None)
                return found

            self._replaced.replace(module, name, asking)
