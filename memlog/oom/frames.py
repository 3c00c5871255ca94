"""Location of an event: the layer and the phase of a step, read from Python's frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

_MODULE_CALL = "_call_impl"
"""Function of ``torch.nn.Module`` that runs a module's ``forward``."""
_BACKWARD = "_engine_run_backward"


def error_location(error: BaseException) -> tuple[str | None, str | None]:
    """Return the layer's path and the phase in which an exception was raised; ``None`` if unknown."""
    return locate(frame for frame, _ in walk_tb(error.__traceback__))


def current_frames() -> list[FrameType]:
    """Return the frames of the calling thread, the outermost first.

    The caller's own frame is left out: if the caller keeps the list in a variable, that frame would refer to
    itself.
    """
    outside = sys._getframe(1).f_back  # noqa: SLF001 - inspect calls it, too
    return [frame for frame, _ in walk_stack(outside)][::-1]


def locate(frames: Iterable[FrameType]) -> tuple[str | None, str | None]:
    """Return the module's path and the phase of the given frames, the outermost first.

    The path is that in the outermost module's ``named_modules()``. During backward no frame of a module is on
    the stack, unless a module is computed again (checkpointing). The phase is then known, and the layer is
    ``None``.
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
            phase = None  # in a closure, whose code is not the optimizer's
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
