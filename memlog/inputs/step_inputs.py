"""Inputs of a step that has just ended, and of a step that failed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from memlog._internal.frame_locals import local_variables
from memlog.events import TensorInput
from memlog.inputs.tensors import TensorFinder

_FRAMES = 64
"""Maximum number of frames to look at."""
_MOST = 300
"""Maximum number of variables to read in a frame."""
_INPUTS = 12
"""Maximum number of inputs to return. Further inputs are left out."""
_MODULE_CALL = "_call_impl"
"""Function of ``torch.nn.Module`` that runs a module's ``forward``."""
_MEMLOG = str(Path(__file__).parents[1]) + "/"


def inputs_at_step_end() -> tuple[tuple[TensorInput, ...], list[Any]]:
    """Return the tensors among the variables of the functions that called the optimizer's step.

    The first part of the result describes them, the second part has the tensors themselves. The variables of
    the innermost function come first. Tensors that require gradients, such as parameters, do not count as
    inputs.
    """
    if "torch" not in sys.modules:
        return (), []
    finder = TensorFinder()
    for frame in program_frames(_outwards(sys._getframe(1))):  # noqa: SLF001 - inspect's is the same
        finder.add(variables_of(frame))
    return tuple(finder.found[:_INPUTS]), finder.tensors[:_INPUTS]


def inputs_of_failure(frames: Iterable[FrameType]) -> tuple[TensorInput, ...]:
    """Return the inputs of a step that failed. ``frames`` is the failure's call stack, outermost frame first.

    The first inputs are tensors in variables of the program's functions, outside the model. The model's
    arguments follow. Each tensor is returned only once.

    If torch's code did not run when the step failed, the step had possibly not got its inputs yet, and the
    variables can be those of the step before. The result is empty then.
    """
    frames = list(frames)
    if not any(map(_is_of_a_step, frames)):
        return ()
    outside: list[FrameType] = []
    inside: list[FrameType] = []
    for frame in frames:
        if inside or frame.f_code.co_name == _MODULE_CALL:
            inside.append(frame)
        else:
            outside.append(frame)
    finder = TensorFinder()
    for frame in program_frames(reversed(outside)):
        finder.add(variables_of(frame))
    if inside:
        finder.add(_arguments(inside))
    return tuple(finder.found[:_INPUTS])


def _is_of_a_step(frame: FrameType) -> bool:
    """Return True if the frame runs torch's code, other than the code that loads data."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    root = str(Path(torch.__file__).parent) + "/"
    file = frame.f_code.co_filename
    return file.startswith(root) and not file.startswith(f"{root}utils/data/")


def _arguments(frames: list[FrameType]) -> list[tuple[str, object]]:
    """Return the arguments of the outermost module call, named as in its ``forward``."""
    held = local_variables(frames[0])
    positional, by_name = held.get("args"), held.get("kwargs")
    names: tuple[str, ...] = ()
    # If hooks for all modules are registered, torch calls `forward` through one more function.
    codes = [frame.f_code for frame in frames[1:3] if frame.f_code.co_name == "forward"]
    if codes:
        names = codes[0].co_varnames[1 : codes[0].co_argcount]
    found: list[tuple[str, object]] = []
    if type(positional) is tuple:
        named = (*names, *(f"args[{at}]" for at in range(len(names), len(positional))))
        found += zip(named, positional, strict=False)
    if type(by_name) is dict:
        found += by_name.items()
    return found


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return the names and values of a frame's variables.

    If the frame runs a Python file's top-level code, return only the variables that this code uses.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        return list(local_variables(frame).items())[:_MOST]
    namespace = frame.f_locals  # the namespace of a module or class itself, not a copy
    if type(namespace) is not dict:
        return []
    return [(name, namespace[name]) for name in code.co_names[:_MOST] if name in namespace]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Look at the first `_FRAMES` frames. Yield those that run neither torch's code nor memlog's code."""
    torch: Any = sys.modules.get("torch")
    foreign = (_MEMLOG,) if torch is None else (_MEMLOG, str(Path(torch.__file__).parent) + "/")
    for frame in islice(frames, _FRAMES):
        if not frame.f_code.co_filename.startswith(foreign):
            yield frame
