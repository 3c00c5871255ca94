"""State of torch in this thread and process: dispatch modes, autograd, the compiler, profilers, oneDNN.

torch may change these parts at any time. The dispatch engine does not run if one of `DISPATCH_NEEDS` is
missing. If any other part is missing, most functions of this module return a default.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from memlog._internal.inert_access import tracked_objects
from memlog.torchside.loaded import NO_TASK

__all__ = ["NO_TASK", "TorchDispatchMode"]

COMPILED_CODE = (
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.output_code", "CompiledAOTI"),
    ("torch.export.pt2_archive._package", "AOTICompiledModel"),
)
"""Classes whose call runs Inductor's code, in the forward or the backward pass, with their modules."""
FSDP = "torch.distributed.fsdp._fully_shard."
"""Beginning of the names of FSDP2's modules."""

_NO_SEQUENCE = 2**62
"""Minimum sequence number of the autograd nodes that no forward operation made. These nodes accumulate
gradients."""


def _find(path: str) -> Callable[..., Any] | None:
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if callable(value) else None


_graph_task = _find("_C._current_graph_task_id")
_current_node = _find("_C._current_autograd_node")
_next_sequence_number = _find("autograd._get_sequence_nr")
_functorch_stack = _find("_C._functorch.peek_interpreter_stack")
is_functorch_wrapper = _find("_C._functorch.is_functorch_wrapped_tensor")
"""Function that returns whether ``torch.func`` has wrapped a tensor."""
unwrap_functorch = _find("_C._functorch.get_unwrapped")
"""Function that returns the tensor inside a wrapper of ``torch.func``."""

DISPATCH_NEEDS = {
    "torch._C._current_graph_task_id": _graph_task,
    "torch._C._current_autograd_node": _current_node,
    "torch.autograd._get_sequence_nr": _next_sequence_number,
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": getattr(
        _python_dispatch, "_get_current_dispatch_mode_stack", None
    ),
}


def missing() -> list[str]:
    """Return the names of the functions in `DISPATCH_NEEDS` that this torch does not have."""
    return sorted(name for name, function in DISPATCH_NEEDS.items() if function is None)


def operation_name(func: Any) -> str:
    """Return the name of an operation without its overload; empty for a higher-order operation."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else ""


def mode_stack() -> list[Any]:
    """Return this thread's dispatch modes, the outermost first."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def dispatch_flags() -> dict[str, bool]:
    """Return torch's flags that a dispatch mode is active in this process."""
    values = vars(_python_dispatch)
    return {name: values[name] for name in _FLAGS if name in values}


def set_dispatch_flags(flags: dict[str, bool]) -> None:
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)


ENGINE = "_engine_run_backward"
"""Name of the function in ``torch.autograd`` that ``backward`` and ``grad`` call to run a backward pass."""


@contextmanager
def without_mode(mode: Any) -> Iterator[None]:
    """Run a block without a dispatch mode. The mode stays if it is not on top of this thread's stack."""
    if not remove_mode_for_node(mode):
        yield
        return
    try:
        yield
    finally:
        _python_dispatch._push_mode(mode)


def remove_mode_for_node(mode: Any) -> bool:
    """Remove a dispatch mode from the top of this thread's stack; return False if the mode is not there.

    In a backward pass, autograd puts the mode back before the next node of the graph runs.
    """
    stack = mode_stack()
    if not stack or stack[-1] is not mode:
        return False
    _python_dispatch._pop_mode()
    return True


def allow_higher_order_ops(kind: type) -> None:
    """Let all higher-order operations run under dispatch modes of the class ``kind``.

    torch without ``supports_higher_order_operators`` needs this. Higher-order operations that are created
    after this call still refuse to run under such a mode.
    """
    operations = getattr(torch._ops, "_higher_order_ops", {})
    for operation in tuple(operations.values()):
        table = getattr(operation, "python_key_table", None)
        if table is not None and kind not in table:
            table[kind] = functools.partial(_call_mode, operation)


def _call_mode(operation: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operation, (), args, kwargs)


def in_functorch_transform() -> bool:
    """Return whether this thread is inside a transformation of ``torch.func`` (``vmap``, ``grad``, …)."""
    return _functorch_stack is not None and _functorch_stack() is not None


def compiler_in_use() -> bool:
    """Return whether anything in this process was passed to ``torch.compile``, and may be compiled."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    return any(backend is not None for backend in _compiler_backends())


def in_compiled_call() -> bool:
    """Return whether this thread is in a call of something that was passed to ``torch.compile``.

    At the end of such a call, torch restores the dispatch keys that it found at the start.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    file = getattr(frames, "__file__", None)
    if file is None or not compiler_in_use():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


_EAGER = "torch._dynamo.backends.debugging"
"""Module of torch's compiler backends that run a graph's operations one by one."""


def unknown_compilers() -> list[str]:
    """Return the names of the ``torch.compile`` backends in use, except Inductor and those of `_EAGER`."""
    names = set()
    for backend in _compiler_backends():
        if type(backend).__name__ == "_TorchCompileInductorWrapper":
            continue
        function = getattr(backend, "compiler_fn", backend)
        home = getattr(function, "__module__", None)
        if home != _EAGER and function is not None:
            names.add(str(getattr(function, "__name__", type(function).__name__)))
    return sorted(names)


def _compiler_backends() -> tuple[Any, ...]:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return tuple((getattr(frames, "cached_backends", None) or {}).values())


def skip_compiling(function: Any) -> None:
    """Tell the compiler to compile neither one of memlog's functions nor what it calls.

    torch calls the hooks of a compiled module in a state in which it compiles every frame. With
    ``fullgraph=True``, a frame that it can't compile ends the program.
    """
    frames = _find("_C._dynamo.eval_frame.set_code_exec_strategy")
    if frames is not None:
        evaluation: Any = torch._C._dynamo.eval_frame
        skip = evaluation._FrameAction.SKIP
        frames(function.__code__, evaluation._FrameExecStrategy(skip, skip))
        return
    older: Any = sys.modules.get("torch._dynamo.eval_frame")
    if hasattr(older, "skip_code"):
        older.skip_code(function.__code__)


def move_compiler_rules(ours: Any, theirs: Any) -> None:
    """Move the compiler's cached rule from a replacement (``ours``) to the original function (``theirs``)."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    table = getattr(rules, "get_torch_obj_rule_map", None)
    if table is not None and table.cache_info().currsize and ours in table():
        table()[theirs] = table().pop(ours)


def compilations() -> int:
    """Return the number of compilations in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None) or {}
    # With fullgraph=True, torch counts graphs and no frames.
    counted = (("frames", "total"), ("stats", "unique_graphs"))
    return sum(int(counters[kind][name]) for kind, name in counted if kind in counters)


def fakes_active() -> bool:
    """Return whether a ``FakeTensorMode`` is active on this thread. New tensors then have no memory."""
    return bool(_fake_modes())


def live_fakes() -> list[Any]:
    """Return the live tensors of this thread's active ``FakeTensorMode``."""
    modes = _fake_modes()
    if not modes:
        return []
    kind = sys.modules["torch._subclasses.fake_tensor"].FakeTensor
    # `isinstance` could run a property `__class__` of one of the program's objects.
    return [
        tensor for tensor in tracked_objects() if type(tensor) is kind and tensor.fake_mode in modes
    ]


def _fake_modes() -> list[Any]:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is None:
        return []
    return [mode for mode in mode_stack() if isinstance(mode, fakes.FakeTensorMode)]


_tracing_state = _find("_C._get_tracing_state")


def tracing_graph() -> bool:
    """Return whether ``torch.jit.trace`` records this thread's operations."""
    return _tracing_state is not None and _tracing_state() is not None


_profiler_enabled = _find("autograd._profiler_enabled")


def profiling() -> bool:
    """Return whether a profiler of torch records this thread's operations."""
    return _profiler_enabled is not None and bool(_profiler_enabled())


def backward_task() -> int:
    """Return the number of this thread's current backward pass, or `NO_TASK`."""
    return NO_TASK if _graph_task is None else int(_graph_task())


def current_node() -> Any:
    """Return the autograd node that this thread is executing; ``None`` if there is none."""
    return None if _current_node is None else _current_node()


def next_sequence_number() -> int | None:
    """Return the number that this thread's next differentiable operation will get; ``None`` if unknown."""
    return None if _next_sequence_number is None else int(_next_sequence_number())


def sequence_number(node: Any) -> int | None:
    """Return the number of an autograd node; ``None`` if no forward operation made the node."""
    number = int(node._sequence_nr())
    return number if 0 <= number < _NO_SEQUENCE else None


def onednn_precisions() -> tuple[str, ...]:
    """Return the precisions in which oneDNN may compute. They decide which arguments oneDNN copies."""
    getter = _find("_C._get_fp32_precision_getter")
    try:
        if getter is None:
            return (torch.get_float32_matmul_precision(),)
        return tuple(str(getter("mkldnn", kind)) for kind in ("matmul", "conv", "rnn"))
    except RuntimeError:
        return ()  # this torch has other names for the precisions


@functools.cache
def onednn_has_bfloat16() -> bool:
    """Return False if the processor has no instructions for oneDNN's bfloat16 (on x86: AVX-512)."""
    supported = _find("ops.mkldnn._is_mkldnn_bf16_supported")
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return supported is None or not has_onednn or bool(supported())


def allocation_profiler() -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return the functions that start and stop torch's legacy profiler, which reports allocations.

    Return ``None`` if this torch has no legacy profiler.
    """
    begin = _find("_C._autograd._enable_profiler_legacy")
    end = _find("_C._autograd._disable_profiler_legacy")
    configuration = _profiler_configuration()
    if begin is None or end is None or configuration is None:
        return None
    return functools.partial(begin, configuration), end


@functools.cache
def _profiler_configuration() -> Any:
    configuration: Any = _find("autograd.ProfilerConfig")
    states: Any = _find("autograd.ProfilerState")
    try:
        experimental = torch._C._profiler._ExperimentalConfig()
        return configuration(states.CPU, False, True, False, False, False, experimental)
    except (AttributeError, TypeError):
        return None  # this torch takes other arguments


PROFILE_MARK = "memlog"
"""Name of the event that `mark_profile` writes."""


def mark_profile() -> None:
    """Write an event to the running profiler."""
    with torch._C._profiler._RecordFunctionFast(PROFILE_MARK):
        pass


@contextmanager
def without_log_warnings() -> Iterator[None]:
    """Inside the block, torch's C++ code logs no warnings.

    Its allocator would log one if code that is profiled frees what was allocated before.
    """
    level = _log_level()
    before = None if level is None else level.value
    try:
        if level is not None:
            level.value = max(level.value, 2)  # errors only
        yield
    finally:
        if level is not None:
            level.value = before


@functools.cache
def _log_level() -> Any:
    """Return the number in torch's memory that decides what is logged; ``None`` if there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
