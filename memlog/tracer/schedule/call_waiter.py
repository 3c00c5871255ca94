"""Waiting for the module call at which a traced step begins."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.schedule.top_modules import RootModules

if TYPE_CHECKING:
    from memlog.tracer.hooks.first_call import ModuleCallHook

_STEADY = 3
"""Steps after which ``torch.compile`` has compiled the model. A hook that is there earlier costs a second
compilation."""


class CallWaiter:
    """Hook for module calls that causes no compilation.

    Args:
        called: Called with each module that is called, and with its inputs.
        diagnostics: Counter of memlog's own errors.
    """

    def __init__(self, called: Callable[[Any, Any], None], diagnostics: Diagnostics) -> None:
        self._called = called
        self._diagnostics = diagnostics
        self._lock = threading.RLock()  # steps end on any thread, and signals interrupt
        self._hook: ModuleCallHook | None = None

    @property
    def waiting(self) -> bool:
        """True if module calls are reported."""
        hook = self._hook
        return hook is not None and not hook.paused

    def start(self) -> None:
        """Start to wait. A second call does nothing."""
        from memlog.tracer.hooks.first_call import ModuleCallHook  # noqa: PLC0415 - torch is loaded already

        with self._lock:
            if self._hook is None:
                self._hook = ModuleCallHook(self._called, self._diagnostics)

    def stop(self) -> None:
        """Remove the hook. A second call does nothing."""
        with self._lock:
            hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def stop_or_pause(self) -> None:
        """Stop, or pause if removing the hook would cause what was compiled since to be compiled again."""
        hook = self._hook
        if hook is not None and hook.compiled_since:
            hook.paused = True
        else:
            self.stop()


def when_to_wait(roots: RootModules, steps: int) -> Literal["now", "later", "never"]:
    """Return when a hook for module calls causes no compilation, after so many steps of the session.

    If the compiler is in use, that is certain only for a compiled module, which calls global hooks outside
    the compiled code, and only after it was compiled. On the CPU, no engine sees anything inside such a
    module.
    """
    if not _compiler_in_use():
        return "now"
    from memlog.tracer.engines.selection import are_compiled, device_of  # noqa: PLC0415 - loads parts of torch

    modules = roots.modules()
    if not are_compiled(modules) or device_of(modules, None).type == "cpu":
        return "never"
    return "later" if steps < _STEADY else "now"


def _compiler_in_use() -> bool:
    if "torch._dynamo" not in sys.modules:
        return False
    from memlog.tracer.torch_private import compiler_in_use  # noqa: PLC0415 - torch is loaded already

    return compiler_in_use()
