"""Backward passes of the program, which run without the watch's dispatch mode.

torch computes some derivatives in another way while any dispatch mode is active (``isTensorSubclassLike`` in
its sources), such as those of ``prod`` and ``masked_fill``: the last bits differ.
"""

from __future__ import annotations

from typing import Any

import torch

from memlog.tracer import torch_private
from memlog.tracer.engines.cpu.dispatch_mode import ObservingMode
from memlog.tracer.hooks.shared_hook import SharedHook


class _BackwardPasses(SharedHook[ObservingMode]):
    """Patch of the function that runs torch's engine. Its holders are modes that do not take part."""

    def __init__(self) -> None:
        super().__init__()
        self._original: Any = None

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch_private.without_mode(self.holders):
                return self._original(*args, **kwargs)

        self._replacement = run

    def _install(self) -> None:
        if self._original is None:
            self._original = getattr(torch.autograd, torch_private.ENGINE, None)
            if self._original is not None:
                setattr(torch.autograd, torch_private.ENGINE, self._replacement)

    def _uninstall(self) -> None:
        """Restore the original. If another patch lies on top, this one stays below it without modes."""
        if getattr(torch.autograd, torch_private.ENGINE, None) is self._replacement:
            setattr(torch.autograd, torch_private.ENGINE, self._original)
            self._original = None


BACKWARD_PASSES = _BackwardPasses()
