"""Hearing of what no dispatch mode sees, since it happens below or beside torch's operations.

FSDP frees gathered parameters with ``storage.resize_(0)``; checkpointing copies the random number generator's
state; compiled code asks the allocator by itself. While somebody listens, each of these functions is replaced
by one that calls it and tells; afterwards all is as it was.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from memlog._internal import fork
from memlog.tracer import torch_private

_Listener = Callable[[Any, Any], None]


class FunctionPatch:
    """One function of torch's, and who hears of its calls.

    Args:
        holder: The class or module that has it.
        name: Its name there. It may be another's by now, and another's may come on top of ours.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name
        self._listeners: list[_Listener] = []
        self._lock = threading.Lock()
        self._on = False
        self._own = False
        self._before: Any = None
        fork.renew(self, "_lock", threading.Lock)

        def call_and_notify(*args: Any, **kwargs: Any) -> Any:
            result = self._before(*args, **kwargs)
            for listener in self._listeners.copy():
                listener(result, args)
            return result

        self._replacement = call_and_notify

    def subscribe(self, listener: _Listener) -> None:
        """From now on ``listener`` is called with what each call has returned, and its arguments."""
        with self._lock:
            self._listeners.append(listener)
            if not self._on:
                self._own = self._name in vars(self._holder)
                self._before = getattr(self._holder, self._name)
                torch_private.skip_compiling(self._replacement)
                setattr(self._holder, self._name, self._replacement)
                self._on = True

    def unsubscribe(self, listener: _Listener) -> None:
        """No longer. Calling it again is harmless."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                self._undo()

    def _undo(self) -> None:
        """As it was; where another's lies on top ours stays below it and tells nobody."""
        if not self._on or vars(self._holder).get(self._name) is not self._replacement:
            return
        if self._own:
            setattr(self._holder, self._name, self._before)
        else:
            delattr(self._holder, self._name)  # what it inherits shows again
        torch_private.move_compiler_rules(self._replacement, self._before)
        self._on = False


STORAGE_RESIZES: Final = FunctionPatch(torch.UntypedStorage, "resize_")
"""Storages that Python resizes."""
RANDOM_STATE_COPIES: Final = FunctionPatch(torch, "get_rng_state")
"""Copies of the random number generator's state, which checkpointing keeps."""

_COMPILED = (
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.output_code", "CompiledAOTI"),
    ("torch.export.pt2_archive._package", "AOTICompiledModel"),
)
"""What Inductor's code is called through, forward and backward."""
_compiled: dict[str, FunctionPatch] = {}


def compiled_code() -> Sequence[FunctionPatch]:
    """Calls of Inductor's code, as far as this process has loaded what calls it."""
    for module, name in _COMPILED:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and name not in _compiled:
            _compiled[name] = FunctionPatch(found, "__call__")
    return tuple(_compiled.values())
