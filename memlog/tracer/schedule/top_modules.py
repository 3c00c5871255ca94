"""The modules at the top, which no module calls: those that a session's traces are of."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

_MOST_PARAMETERS = 10_000
"""That are looked at, to find one that is trained."""


def trained_elsewhere(thread: threading.Thread | None) -> bool:
    """Whether what that thread trains may change while this thread looks at it.

    torch guards no gradient: reading ``parameter.grad`` here while that thread resets it ends the process.
    Threads that Python has not started are autograd's, on which an optimizer may step for its trainer's.
    """
    if thread is None or thread is threading.current_thread():
        return False
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


class RootModules:
    """They are remembered from trace to trace, held weakly, each with the thread that trains it.

    Args:
        model: The first, where the user has named one.
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._thread: threading.Thread | None = None
        self._others: list[tuple[weakref.ref[Any], threading.Thread | None]] = []

    def modules(self) -> list[Any]:
        """Those that no other thread trains, as far as they are roots: in one order, so that names stay."""
        roots = [
            None if trained_elsewhere(self._thread) else self._model,
            *(root() for root, thread in self._others if not trained_elsewhere(thread)),
        ]
        return [module for module in roots if module is not None]

    def remember(self, roots: Sequence[Any], thread: threading.Thread | None) -> None:
        """Modules without parameters are found anew each time, and parts of others are no root.

        Args:
            roots: What one trace was of.
            thread: That was traced.
        """
        trained = [root for root in roots if next(root.parameters(), None) is not None]
        parts = {id(part) for root in trained for part in root.modules() if part is not root}
        if any(root is self._model for root in trained):
            self._thread = thread
        mine = {
            id(root): root for root in trained if root is not self._model and id(root) not in parts
        }
        self._others = [
            (root, other)
            for root, other in self._others
            if trained_elsewhere(other) and id(root()) not in mine
        ] + [(weakref.ref(root), thread) for root in mine.values()]

    def may_train(self, module: Any) -> bool:
        """Whether what is called may begin a training step.

        What has nothing to be trained, such as a transform of the data, does not. Being in the mode of
        evaluation says nothing: with its statistics frozen a model is trained in it.

        Args:
            module: That is called.
        """
        import torch  # noqa: PLC0415 - it is there: a module of it is called

        if not torch.is_grad_enabled():
            return False
        parameters = itertools.chain.from_iterable(
            root.parameters() for root in (self.modules() or [module])
        )
        return any(
            parameter.requires_grad for parameter in itertools.islice(parameters, _MOST_PARAMETERS)
        )
