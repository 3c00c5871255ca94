"""Patch of the function that ``backward`` and ``grad`` call to run torch's autograd engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from memlog.tracer import torch_private
from memlog.tracer.hooks.shared_hook import SharedHook


class BackwardListener(Protocol):
    def during_backward(
        self, outputs: Sequence[Any], *, makes_cycles: bool
    ) -> AbstractContextManager[None]:
        """Return a context manager for one backward pass. It never raises an error of its own.

        Args:
            outputs: Tensors, or edges of the graph, that are differentiated.
            makes_cycles: True for ``backward(create_graph=True)``, after which a parameter and its gradient
                keep each other alive.
        """


class _BackwardPasses(SharedHook[BackwardListener]):
    def __init__(self) -> None:
        super().__init__()
        self._original: Any = None
        self._on = False

        def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            creates_graph = args[2:3] == (True,)
            cycles = creates_graph and kwargs.get("accumulate_grad") is True
            with ExitStack() as stack:
                for listener in self.holders:
                    stack.enter_context(listener.during_backward(outputs, makes_cycles=cycles))
                return self._original(outputs, *args, **kwargs)

        self._replacement = run

    def _install(self) -> None:
        original = getattr(torch.autograd, torch_private.ENGINE, None)
        if original is None or self._on:
            return
        # After a window, a library may have put memlog's replacement back. `_original` is then still right.
        if original is not self._replacement:
            self._original = original
        setattr(torch.autograd, torch_private.ENGINE, self._replacement)
        self._on = True

    def _uninstall(self) -> None:
        """Restore the original function.

        If another library has patched the function later, keep memlog's patch, without listeners.
        """
        if getattr(torch.autograd, torch_private.ENGINE, None) is self._replacement:
            setattr(torch.autograd, torch_private.ENGINE, self._original)
            self._on = False


BACKWARD_PASSES = _BackwardPasses()
