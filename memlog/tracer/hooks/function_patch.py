"""Patches of functions of torch, which are installed as long as somebody needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from memlog.tracer import torch_private
from memlog.tracer.hooks.shared_hook import SharedHook

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
        if not self._on:
            self._own = self._name in vars(self._owner)
            self._before = getattr(self._owner, self._name)
            torch_private.skip_compiling(self._replacement)
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
        torch_private.move_compiler_rules(self._replacement, self._before)
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
