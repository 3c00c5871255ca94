"""Noticing optimizer steps in a loop that knows nothing of memlog.

PyTorch calls global hooks around every ``Optimizer.step()``. The first optimizer whose step begins is
the clock: a wrapper begins before the optimizer that it wraps, so nested steps count once, and of several
optimizers that take turns one is counted. Where the clock falls silent another takes over.

A step that a ``GradScaler`` skips calls no hook and micro-batches of an accumulated gradient are no steps:
neither has an event. Nor has a step inside ``torch.compile``: reading memory there would break its graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPTIMIZER_MODULE = "torch.optim.optimizer"
SILENCE = 10
"""So many steps of other optimizers without one of the clock's mean that it has fallen silent."""


class OptimizerClock:
    """Decides which optimizer steps count.

    Args:
        on_step: Called with the optimizer after each step that counts, on the thread that made it. Must
            not raise.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self._on_step = on_step
        self._clock: weakref.ref[Any] | None = None
        self._armed = False
        self._others = 0

    def begin(self, optimizer: Any) -> None:
        """A step begins."""
        if self._clock is None or self._clock() is None or self._others >= SILENCE:
            self._clock = weakref.ref(optimizer)
            self._others = 0
        if self._clock() is optimizer:
            self._armed = True

    def end(self, optimizer: Any) -> None:
        """A step is over."""
        if self._clock is None or self._clock() is not optimizer:
            self._others += 1
        elif self._armed:
            # A subclass's step that calls its parent's ends twice. It began twice as well, so the hooks
            # can't be paired by counting: a step that raised has begun and never ends.
            self._armed = False
            self._others = 0
            self._on_step(optimizer)


class Autolog:
    """Installs an `OptimizerClock` in torch, now or when torch is imported.

    Args:
        on_step: Called with the optimizer after each step that counts.
    """

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self._clock = OptimizerClock(on_step)
        self._handles: list[Any] = []
        self._watch: ImportWatch | None = None
        module = sys.modules.get(OPTIMIZER_MODULE)
        if module is not None and hasattr(module, "register_optimizer_step_post_hook"):
            self._install(module)
        else:
            self._watch = ImportWatch(OPTIMIZER_MODULE, self._install)

    def remove(self) -> None:
        """Takes everything out again. Calling it again is harmless."""
        if self._watch is not None:
            self._watch.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, module: ModuleType) -> None:
        self._handles = [
            module.register_optimizer_step_pre_hook(
                _unless_compiling(module.torch, self._clock.begin)
            ),
            module.register_optimizer_step_post_hook(
                _unless_compiling(module.torch, self._clock.end)
            ),
        ]


def _unless_compiling(torch: Any, notice: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
    """A hook for torch that is nothing at all in a compiled graph, and so breaks none.

    Args:
        torch: The module, which may still be in the middle of its import.
        notice: What the hook does elsewhere.
    """

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            notice(optimizer)

    return hook


class ImportWatch:
    """A finder on ``sys.meta_path`` that calls back once, right after a module has been imported.

    Args:
        name: The module's full name.
        callback: Gets the module. What it raises would reach whoever imports: it must not.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls back; ``None`` for every other module."""
        if fullname != self._name:
            return None
        self.remove()
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _CallbackLoader(spec.loader, self._callback)
                    spec.loader = loader
                return spec
        return None

    def remove(self) -> None:
        """Stops watching. Calling it again is harmless."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallbackLoader:
    """A module's own loader, and a call when it is done."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        # Resource readers, get_source and the like are the true loader's.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the true loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """As the true loader does; afterwards the module names that one alone."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
