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


def current_frames(left_out: str = "") -> list[FrameType]:
    """Return the frames of the calling thread, the outermost first.

    The caller's own frame is left out. Otherwise a caller that keeps the list in a variable would have a
    frame that refers to itself. Frames of the file ``left_out`` are left out, too.

    The backward pass on a device runs in a thread of its own, which begins with no frame of the program. In
    that thread, the frames of the thread that called the backward pass come first, if they are known.
    """
    outside = sys._getframe(1).f_back  # noqa: SLF001 - inspect calls it, too
    own = [frame for frame, _ in walk_stack(outside) if frame.f_code.co_filename != left_out][::-1]
    if is_in_backward() and all(frame.f_code.co_name != _BACKWARD for frame in own):
        return [*_caller_of_backward(), *own]
    return own


def is_in_backward() -> bool:
    """Return True if the calling thread runs an operation of a backward pass."""
    torch = sys.modules.get("torch")
    current = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return current is not None and current() != -1


def _caller_of_backward() -> list[FrameType]:
    """Return the frames of the thread that waits for a backward pass, the outermost first.

    If several threads wait, return no frames: it is unknown which of them called the calling thread's pass.
    While a thread waits, it runs no Python code, so that its frames do not change.
    """
    waiting = [
        frame
        for frame in sys._current_frames().values()  # noqa: SLF001 - the only way
        if frame.f_code.co_name == _BACKWARD
    ]
    if len(waiting) != 1:
        return []
    return [frame for frame, _ in walk_stack(waiting[0])][::-1]


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


def optimizer_of(frames: Iterable[FrameType]) -> Any:
    """Return the innermost optimizer whose ``step`` runs in these frames; ``None`` if there is none."""
    torch: Any = sys.modules["torch"]
    found = None
    for frame in frames:
        if frame.f_code.co_name == "step":
            owner = frame.f_locals.get("self")
            found = owner if isinstance(owner, torch.optim.Optimizer) else found
    return found


def _path(modules: list[Any]) -> str | None:
    if not modules:
        return None
    root, layer = modules[0], modules[-1]
    named = (path for path, module in root.named_modules() if module is layer)
    path = next(named, None)
    kind = type(layer).__name__
    return f"{path} ({kind})" if path else kind
