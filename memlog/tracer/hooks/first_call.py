"""Hook that observes module calls outside compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.hooks.warning_filter import COMPILE_WARNING_FILTER
from memlog.tracer.torch_private import compilations


class ModuleCallHook:
    """One global hook, until `remove`.

    Args:
        called: Called with the module and its inputs. Its errors are counted and not raised.
        diagnostics: Counter of these errors.

    Attributes:
        paused: True if calls are ignored.
    """

    def __init__(self, called: Callable[[Any, Any], None], diagnostics: Diagnostics) -> None:
        compiling = torch.compiler.is_compiling
        self.paused = False
        self._compiled = compilations()

        def hook(module: Any, inputs: Any) -> None:
            if compiling() or self.paused:
                return
            try:
                called(module, inputs)
            except Exception as error:  # noqa: BLE001 - training goes on
                diagnostics.fault("noticing a module that is called", error)

        COMPILE_WARNING_FILTER.add(self)
        self._handle = register_module_forward_pre_hook(hook)

    @property
    def compiled_since(self) -> bool:
        """True if something was compiled while the hook was installed."""
        return compilations() != self._compiled

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        COMPILE_WARNING_FILTER.remove(self)
