"""Patches of torch's functions that are installed once in a process, as long as somebody needs them.

A mode can't be removed while another mode lies on top of it on the stack. It also can't be removed if one
thread opened the window and another thread closed it. At each module call, a hook tries again to remove the
mode.

torch warns at every call of a compiled module while there are global hooks on modules. If the user turns
warnings into errors, the warning ends training.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memlog.torchside import internals
from memlog.tracer.shared_hook import SharedHook


class ClosedWindow(Protocol):
    """Closed window, or the engine of a closed window."""

    def leave(self) -> bool:
        """Try to remove what the window has left in torch. Return True if nothing is left. Never raise."""


class _WaitingWindows(SharedHook[ClosedWindow]):
    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def attempt(self) -> None:
        """Remove the modes that can be removed on this thread now."""
        for window in self.holders:
            if window.leave():
                self.remove(window)

    def _install(self) -> None:
        COMPILE_WARNING_FILTER.add(self)
        self._handle = register_module_forward_pre_hook(_module_called)

    def _uninstall(self) -> None:
        self._handle.remove()
        COMPILE_WARNING_FILTER.remove(self)


_waiting = _WaitingWindows()
remove_waiting = _waiting.attempt


def remove_when_possible(window: ClosedWindow) -> None:
    """Remove from torch what is left of a closed window: now if possible, else at a later module call."""
    if not window.leave():
        _waiting.add(window)
    else:
        _waiting.attempt()  # the removed mode may have been on top of one that waits


def _module_called(_module: Any, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _waiting.attempt()


_Holder = TypeVar("_Holder")
_Listener = Callable[[Any, Any], None]
_Around = Callable[..., Any]


class _Patch(SharedHook[_Holder], Generic[_Holder]):
    """Patch of one function.

    Args:
        owner: Class or module that has the function as an attribute.
        name: Name of the function. Another library may replace the same function, before or after memlog.
    """

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__()
        self._owner = owner
        self._name = name
        self._on = False
        self._own = False
        self._before: Any = None

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self._replacement = replacement

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _install(self) -> None:
        # After `_uninstall`, the patch can still be there, below another library's patch.
        if not self._on:
            # A function that the owner inherits must not be written into the owner afterwards.
            self._own = self._name in vars(self._owner)
            self._before = getattr(self._owner, self._name)
            internals.skip_compiling(self._replacement)
            setattr(self._owner, self._name, self._replacement)
            self._on = True

    def _uninstall(self) -> None:
        """Restore the original function.

        If another library has patched the function later, keep memlog's patch, without holders.
        """
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)  # the inherited function is visible again
        internals.move_compiler_rules(self._replacement, self._before)
        self._on = False


class FunctionPatch(_Patch[_Listener]):
    """Patch that calls every listener after each call of a function, with the result and the arguments."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(owner, name)
        self._silent = False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        result = self._before(*args, **kwargs)
        for listener in () if self._silent else self.holders:
            listener(result, args)
        return result

    @contextmanager
    def without_listeners(self) -> Iterator[None]:
        """Notify no listener of the calls inside the block."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before


class AroundPatch(_Patch[_Around]):
    """Patch whose holders call a function: each one gets the function, and the arguments of the call."""

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        function = self._before
        for holder in self.holders:
            function = functools.partial(holder, function)
        return function(*args, **kwargs)


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
            # After the outputs come the gradients, `keep_graph` and `create_graph`.
            creates_graph = args[2:3] == (True,)
            # `torch.autograd.grad` does not accumulate gradients, so it makes no such cycles.
            cycles = creates_graph and kwargs.get("accumulate_grad") is True
            with ExitStack() as stack:
                for listener in self.holders:
                    stack.enter_context(listener.during_backward(outputs, makes_cycles=cycles))
                return self._original(outputs, *args, **kwargs)

        self._replacement = run

    def _install(self) -> None:
        original = getattr(torch.autograd, internals.ENGINE, None)
        if original is None or self._on:
            return
        # After a window, a library may have put memlog's replacement back. `_original` is then still right.
        if original is not self._replacement:
            self._original = original
        setattr(torch.autograd, internals.ENGINE, self._replacement)
        self._on = True

    def _uninstall(self) -> None:
        """Restore the original function.

        If another library has patched the function later, keep memlog's patch, without listeners.
        """
        if getattr(torch.autograd, internals.ENGINE, None) is self._replacement:
            setattr(torch.autograd, internals.ENGINE, self._original)
            self._on = False


BACKWARD_PASSES = _BackwardPasses()


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
