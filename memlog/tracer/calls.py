"""Hearing of every module that is called, outside compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memlog.health import Health
from memlog.tracer.silence import Silence


class Calls:
    """One global hook, until `remove`.

    Args:
        called: Told of the module and its inputs. Its errors are counted and reach nobody.
        health: Where they are counted.
    """

    def __init__(self, called: Callable[[Any, Any], None], health: Health) -> None:
        compiling = torch.compiler.is_compiling

        def hook(module: Any, inputs: Any) -> None:
            if compiling():
                return
            try:
                called(module, inputs)
            except Exception as error:  # noqa: BLE001 - training goes on
                health.fault("noticing a module that is called", error)

        self._silence = Silence()
        self._handle = register_module_forward_pre_hook(hook)

    def remove(self) -> None:
        """Takes it out again."""
        self._handle.remove()
        self._silence.end()
