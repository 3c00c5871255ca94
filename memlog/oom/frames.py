"""Layer and phase that a thread is running, read from the thread's Python frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

_MODULE_CALL = "_call_impl"
"""Function of ``torch.nn.Module`` that runs a module's ``forward``."""
_BACKWARD = "_engine_run_backward"


def current_frames() -> list[FrameType]:
    """Return the frames of the calling thread, the outermost first.

    The caller's own frame is left out. Otherwise a caller that keeps the list in a variable would have a
    frame that refers to itself.
    """
    outside = sys._getframe(1).f_back  # noqa: SLF001 - inspect calls it, too
    return [frame for frame, _ in walk_stack(outside)][::-1]


def locate(frames: Iterable[FrameType]) -> tuple[str | None, str | None]:
    """Return the layer and the phase that a thread is running. Each is ``None`` if it is unknown.

    ``frames`` holds the frames of the thread, the outermost first.

    The layer is a text such as ``encoder.0 (Linear)``: the path in the outermost module's
    ``named_modules()``, and the class. In a backward pass, the phase is ``backward`` and the layer is usually
    ``None``, because the frames contain no module. Only checkpointing runs modules again in a backward pass.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None
    modules: list[Any] = []
    phase: str | None = None
    optimizer_folders: tuple[str, ...] = (str(Path(torch.__file__ or "").parent),)
    for frame in frames:
        name = frame.f_code.co_name
        if phase == "optimizer" and not frame.f_code.co_filename.startswith(optimizer_folders):
            phase = None  # the frame is a closure that the optimizer calls; the closure is the program's code
        if name == _MODULE_CALL:
            phase = "backward" if phase == "backward" else "forward"
        elif name == _BACKWARD:
            phase, modules = "backward", []
            continue
        elif name != "step":
            continue
        owner = frame.f_locals.get("self")
        if name == _MODULE_CALL and isinstance(owner, torch.nn.Module):
            modules.append(owner)
        elif name == "step" and isinstance(owner, torch.optim.Optimizer):
            phase, modules = "optimizer", []
            optimizer_folders = (optimizer_folders[0], str(Path(frame.f_code.co_filename).parent))
    return _path(modules), phase


def _path(modules: list[Any]) -> str | None:
    if not modules:
        return None
    root, layer = modules[0], modules[-1]
    named = (path for path, module in root.named_modules() if module is layer)
    path = next(named, None)
    kind = type(layer).__name__
    return f"{path} ({kind})" if path else kind
