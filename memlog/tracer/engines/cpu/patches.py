"""Patches of torch functions that no dispatch mode sees.

FSDP frees gathered parameters with ``storage.resize_(0)``. Checkpointing copies the random number generator's
state. Compiled code calls the allocator directly. While there is a listener, memlog replaces each of these
functions by one that calls the original and then the listeners. When no listener is left, memlog restores the
original.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from memlog.tracer import torch_private
from memlog.tracer.hooks.shared_hook import SharedHook

_Listener = Callable[[Any, Any], None]


class FunctionPatch(SharedHook[_Listener]):
    """Patch of one torch function. After each call, every listener gets the result and the arguments.

    Args:
        holder: Class or module that has the function as an attribute.
        name: Name of the function. Another library may replace the same function, before or after memlog.
    """

    def __init__(self, holder: Any, name: str) -> None:
        super().__init__()
        self._holder = holder
        self._name = name
        self._on = False
        self._own = False
        self._before: Any = None
        self._silent = False

        def call_and_notify(*args: Any, **kwargs: Any) -> Any:
            result = self._before(*args, **kwargs)
            for listener in () if self._silent else self.holders:
                listener(result, args)
            return result

        self._replacement = call_and_notify

    @contextmanager
    def without_listeners(self) -> Iterator[None]:
        """Notify no listener of the calls inside the block."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def _install(self) -> None:
        if not self._on:
            self._own = self._name in vars(self._holder)
            self._before = getattr(self._holder, self._name)
            torch_private.skip_compiling(self._replacement)
            setattr(self._holder, self._name, self._replacement)
            self._on = True

    def _uninstall(self) -> None:
        """Restore the original function.

        If another library has patched the function later, keep memlog's patch, without listeners.
        """
        if vars(self._holder).get(self._name) is not self._replacement:
            return
        if self._own:
            setattr(self._holder, self._name, self._before)
        else:
            delattr(self._holder, self._name)  # the inherited function is visible again
        torch_private.move_compiler_rules(self._replacement, self._before)
        self._on = False


STORAGE_RESIZES: Final = FunctionPatch(torch.UntypedStorage, "resize_")
"""Resizing of storages by Python code."""
RANDOM_STATE_COPIES: Final = FunctionPatch(torch, "get_rng_state")
"""Copies of the random number generator's state. Checkpointing makes and keeps such copies."""

_COMPILED = (
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.output_code", "CompiledAOTI"),
    ("torch.export.pt2_archive._package", "AOTICompiledModel"),
)
"""Classes whose call runs Inductor's code, in the forward or the backward pass."""
_compiled: dict[str, FunctionPatch] = {}


def compiled_code() -> Sequence[FunctionPatch]:
    """Return a patch for each class that runs Inductor's code and that this process has loaded."""
    for module, name in _COMPILED:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and name not in _compiled:
            _compiled[name] = FunctionPatch(found, "__call__")
    return tuple(_compiled.values())
