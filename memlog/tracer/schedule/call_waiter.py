"""Waiting for the module call at which a traced step begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.hooks.warning_filter import COMPILE_WARNING_FILTER
from memlog.tracer.schedule.top_modules import RootModules

_STEADY = 3
"""Number of steps after which ``torch.compile`` has compiled the model. A hook that is installed earlier
causes a second compilation."""


class CallWaiter:
    """Global hook for module calls outside compiled code. The hook causes no compilation.

    ``called`` gets the module and the inputs of each module call. Errors that it raises are counted, and not
    passed on.
    """

    def __init__(self, called: Callable[[Any, Any], None], diagnostics: Diagnostics) -> None:
        self._called = called
        self._diagnostics = diagnostics
        self._lock = threading.RLock()  # reentrant: a signal handler may run on the holder's thread
        self._handle: Any = None
        self._paused = False
        self._compilations: Callable[[], int] = int
        self._compiled = 0

    @property
    def waiting(self) -> bool:
        """True if module calls are reported."""
        return self._handle is not None and not self._paused

    def start(self) -> None:
        """Install the hook. A second call does nothing."""
        with self._lock:
            if self._handle is None:
                self._install()

    def stop(self) -> None:
        """Remove the hook. A second call does nothing."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()
                COMPILE_WARNING_FILTER.remove(self)

    def stop_or_pause(self) -> None:
        """Remove the hook. If code was compiled since `start`, only pause the reports of module calls.

        Removing the hook would compile that code again.
        """
        if self._handle is not None and self._compilations() != self._compiled:
            self._paused = True
        else:
            self.stop()

    def _install(self) -> None:
        import torch  # noqa: PLC0415 - loaded already

        from memlog.tracer import torch_private  # noqa: PLC0415 - torch is loaded already

        compiling = torch.compiler.is_compiling

        def hook(module: Any, inputs: Any) -> None:
            if compiling() or self._paused:
                return
            try:
                self._called(module, inputs)
            except Exception as error:  # noqa: BLE001 - training goes on
                self._diagnostics.fault("noticing a module that is called", error)

        torch_private.skip_compiling(hook)
        self._paused, self._compilations = False, torch_private.compilations
        self._compiled = torch_private.compilations()
        COMPILE_WARNING_FILTER.add(self)
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)


def when_to_wait(roots: RootModules, steps: int) -> Literal["now", "later", "never"]:
    """Return when a hook for module calls can be installed without causing a compilation.

    - "now": ``torch.compile`` is not in use, or has compiled its code.
    - "later": ``torch.compile`` has yet to compile its code.
    - "never": Tracing would compile code again, or make it run uncompiled. This is so with older torch, if
      the compiled model is on the CPU, or if code outside the model is compiled.

    ``steps``: Number of the session's steps so far.
    """
    from memlog.tracer.torch_private import compiler_in_use  # noqa: PLC0415 - torch is loaded already

    if not compiler_in_use():
        return "now"
    from memlog.tracer.engines.cpu.dispatch_mode import leaves_code_compiled  # noqa: PLC0415 - loads parts of torch
    from memlog.tracer.engines.selection import are_compiled, device_of  # noqa: PLC0415 - likewise

    modules = roots.modules()
    if not leaves_code_compiled() and (
        not are_compiled(modules) or device_of(modules, None).type == "cpu"
    ):
        return "never"
    return "later" if steps < _STEADY else "now"
