"""Root modules: modules that no other module calls. A session traces their layers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any


def trained_elsewhere(thread: threading.Thread | None) -> bool:
    """Return whether ``thread`` is another thread that may be training its models now.

    The process crashes if one thread reads ``parameter.grad`` while another thread resets the gradient.
    Return False for autograd's threads. Optimizer steps on these threads belong to the thread that calls
    ``backward``.
    """
    if thread is None or thread is threading.current_thread():
        return False
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


class RootModules:
    """Root modules that a session remembers between traces, each with the thread that trains it.

    All modules except ``model`` are held weakly.

    Args:
        model: First root module, if the user has named one; else ``None``.
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._thread: threading.Thread | None = None
        self._others: list[tuple[weakref.ref[Any], threading.Thread | None]] = []
        self._optimizers: list[weakref.ref[Any]] = []

    def named(self) -> Any:
        """Return the model that the user has named; ``None`` if there is none or another thread trains it."""
        return None if trained_elsewhere(self._thread) else self._model

    def modules(self) -> list[Any]:
        """Return the known root modules, except those that another thread trains.

        Their order is always the same, because it decides the modules' names in a trace.
        """
        roots = [
            self.named(),
            *(root() for root, thread in self._others if not trained_elsewhere(thread)),
        ]
        return [module for module in roots if module is not None]

    def optimizers(self) -> list[Any]:
        """Return the optimizers that tell which root modules are trained. Some may never have stepped."""
        return [one for one in (reference() for reference in self._optimizers) if one is not None]

    def remember(
        self, roots: Sequence[Any], thread: threading.Thread | None, optimizers: Sequence[Any]
    ) -> None:
        """Replace the remembered root modules of ``thread`` by ``roots``, and remember ``optimizers``.

        Leave out modules without parameters, and modules that are parts of other modules.
        """
        self._optimizers = [weakref.ref(one) for one in optimizers]
        trained = [root for root in roots if next(root.parameters(), None) is not None]
        parts = {id(part) for root in trained for part in root.modules() if part is not root}
        if any(root is self._model for root in trained):
            self._thread = thread
        own_roots = {
            id(root): root for root in trained if root is not self._model and id(root) not in parts
        }
        self._others = [
            (root, other)
            for root, other in self._others
            if trained_elsewhere(other) and id(root()) not in own_roots
        ] + [(weakref.ref(root), thread) for root in own_roots.values()]

    def may_train(self, module: Any) -> bool:
        """Return whether a call of ``module`` may begin a training step.

        Return False if nothing can be trained, for example in a transform of the data. A module in evaluation
        mode may begin a step, because models with frozen statistics are trained in this mode.
        """
        import torch  # noqa: PLC0415 - loaded already: a module is called

        if not torch.is_grad_enabled():
            return False
        return any(
            parameter.requires_grad
            for root in (self.modules() or [module])
            for parameter in root.parameters()
        )
