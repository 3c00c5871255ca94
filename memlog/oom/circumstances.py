"""Circumstances of a failed allocation: what the program was doing, in which layer, and the host's limits.

memlog gets an exception only after the stack has unwound and the step's memory was released. At that time,
more memory is free than at the failure. So memlog reads the highest memory use of the process, which the
kernel records. The use at the failure was at most this highest use.
"""

from __future__ import annotations

import linecache
import os
import re
import resource
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

from memlog._internal.inert_access import instance_dict, is_kind, type_name
from memlog._internal.terminal import source_name
from memlog.events import Activity, GraphInUse, HeldTensors
from memlog.inputs.step_inputs import program_frames, variables_of
from memlog.oom.device_state import (
    SMALL_SEGMENT,
    address,
    held_tensors,
    is_on,
    kept_graph,
    sizes_of,
    tensors_in,
)
from memlog.oom.device_state import size as size_of
from memlog.probes.machine import available_memory, machine_memory, read_cgroup
from memlog.torchside.loaded import in_backward

_STATE_TENSORS = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta"), 2),
    **dict.fromkeys(("SGD", "RMSprop", "Adagrad"), 1),
}
"""Number of tensors of a parameter's size that torch's optimizers keep for each parameter."""
_EVALUATES = re.compile(
    r"(?:\A|_)(?:eval|evaluate|evaluation|valid|validate|validation|val|predict|prediction|infer|inference)"
    r"(?:_|\Z)|\Atest(?:_(?:step|epoch|loop|model))?\Z|(?:\A|_)accuracy(?:_|\Z)"
)
"""Functions that evaluate a model or use it, by name."""
_COPIES = re.compile(r"\.clone\(|\.to\(|\.cuda\(|\bdeepcopy\(|\bcopy_?\(")
"""Code that copies a tensor."""
_GENERATES = re.compile(
    r"(?:\A|_)(?:generate|decode|sample_tokens|beam_search|greedy_search)(?:_|\Z)"
)
"""Functions that generate tokens, by name."""
_CACHE = re.compile(
    r"\A(?:past|past_key_values?|layer_past|kvs?|(?:kv|key_value)_?caches?)\Z", re.IGNORECASE
)
"""Variables that hold the keys and values of earlier tokens, by name."""
_ANY_CACHE = re.compile(rf"{_CACHE.pattern}|\A(?:\w+_)?caches?\Z", re.IGNORECASE)
"""The same in a function that generates tokens. Elsewhere, a cache can hold anything."""
_DISTRIBUTED = "torch/nn/parallel/distributed.py"
_PARAMETER = "torch/nn/parameter.py"
_MODULE = "torch/nn/modules/module.py"
_SMALL = 1024**2
_LARGE, _LARGE_SEGMENT = 10 * 1024**2, 20 * 1024**2
_ROUND = 2 * 1024**2
"""Sizes of segments, by the requested size (c10/core/AllocatorConfig.h)."""
_DEPTH = 6
_ITEMS = 1_000
_VALUES = 20_000
"""Maximum number of values to look at in a search for tensors."""


class Doing(NamedTuple):
    """An `Activity`, what it is about, and the bytes that it makes or holds. ``None``: unknown."""

    activity: Activity | None = None
    subject: str | None = None
    size: int | None = None


class Circumstances(NamedTuple):
    """The program at a failed allocation; ``None``: unknown."""

    line: str | None
    thread: str | None
    gradients: bool
    model: int | None
    """Bytes on the device of the parameters, buffers and gradients of the modules in use."""
    doing: Doing
    held: HeldTensors | None
    graph: GraphInUse | None


def circumstances(
    torch: Any, frames: Sequence[FrameType], phase: str | None, device: int, requested: int
) -> Circumstances:
    """Return what the program was doing. ``frames`` are the running functions, the outermost first.

    ``phase`` is the phase of training that `locate` found. ``requested`` is the size of the failed request to
    the driver, in bytes.
    """
    models = _Models(torch, frames, device)
    gradients = bool(torch.is_grad_enabled())
    return Circumstances(
        line_of(frames),
        _thread(),
        gradients,
        models.size,
        _doing(torch, frames, phase, models, device, requested, gradients=gradients),
        held_tensors(torch, frames, device, models.addresses),
        kept_graph(torch, frames),
    )


def line_of(frames: Sequence[FrameType]) -> str | None:
    """Return the innermost line of the program, such as ``train.py:42 in save``; ``None`` if there is none.

    Lines of torch, memlog, Python's library and other installed packages do not count.
    """
    frame = _innermost(frames)
    if frame is None:
        return None
    name = frame.f_code.co_name
    where = f"{source_name(frame.f_code.co_filename)}:{frame.f_lineno}"
    return where if name.startswith("<") else f"{where} in {name}"


def source_of(frames: Sequence[FrameType]) -> str:
    """Return the text of the program's innermost line; empty if it is unknown."""
    frame = _innermost(frames)
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _innermost(frames: Sequence[FrameType]) -> FrameType | None:
    installed = tuple(
        f"{folder}/"
        for folder in {
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("purelib"),
            sysconfig.get_path("platlib"),
            site.getusersitepackages(),
        }
    )
    inner = list(program_frames(reversed(frames)))
    own = (
        frame for frame in inner if not frame.f_code.co_filename.startswith((*installed, "<frozen"))
    )
    return next(own, None)


def _thread() -> str | None:
    """Return the name of the calling thread; ``None`` for the main thread and for threads of torch."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):  # noqa: SLF001
        return None
    return thread.name


def _doing(
    torch: Any,
    frames: Sequence[FrameType],
    phase: str | None,
    models: _Models,
    device: int,
    requested: int,
    *,
    gradients: bool,
) -> Doing:
    if phase == "optimizer":
        return _of_optimizer(torch, optimizer_of(frames), device)
    if frames and frames[-1].f_code.co_filename.endswith(_DISTRIBUTED):
        return _of_buckets(torch, frames[-1], device)
    moved = _moved(torch, frames)
    if moved is not None:
        return Doing(
            "model to the device", type_name(moved), sum(sizes_of(_weights(moved)).values())
        )
    copied = _copied(frames, models, requested)
    if copied.activity is not None:
        return copied
    if gradients:
        return _with_gradients(frames, phase, models)
    return _of_inference(torch, frames, device, phase, models)


def _with_gradients(frames: Sequence[FrameType], phase: str | None, models: _Models) -> Doing:
    """Return ``evaluation`` if a function evaluates a model in evaluation mode.

    Its name has to say so, because models are trained in evaluation mode, too, such as those that
    ``from_pretrained`` returns.
    """
    evaluates = _named(_EVALUATES, frames)
    if phase == "forward" and not models.is_training and evaluates is not None:
        return Doing("evaluation", evaluates)
    return Doing()


def _of_inference(
    torch: Any, frames: Sequence[FrameType], device: int, phase: str | None, models: _Models
) -> Doing:
    """Return the activity of code without gradients, in a module or outside.

    It is ``generation`` if a function has a cache of keys and values, or a function's name says so and a
    module runs. In a model in training mode, code without gradients is no evaluation unless a function's name
    says so: checkpointing runs layers without gradients, too.
    """
    generates = _named(_GENERATES, frames)
    cache = _cache(torch, frames, device, _CACHE if generates is None else _ANY_CACHE)
    if cache or (generates is not None and phase == "forward"):
        return Doing("generation", None, cache or None)
    evaluates = _named(_EVALUATES, frames)
    if evaluates is not None or (phase == "forward" and not models.is_training):
        return Doing("evaluation", evaluates)
    return Doing()


def _named(pattern: re.Pattern[str], frames: Sequence[FrameType]) -> str | None:
    """Return the innermost function of the program or of a package with a name; ``None``: there is none."""
    names = (frame.f_code.co_name for frame in program_frames(reversed(frames)))
    return next((name for name in names if pattern.search(name)), None)


def _of_optimizer(torch: Any, optimizer: Any, device: int) -> Doing:
    """Return ``optimizer state`` if the optimizer lacks state, which its step makes."""
    if optimizer is None:
        return Doing()
    own, tensors = 0, _tensors_of_state(torch, optimizer)
    most, lacking = 0, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and is_on(parameter, device):
                own += size_of(parameter)
                state = optimizer.state.get(parameter, {})
                # A tensor without dimensions is a step counter.
                held = sum(
                    isinstance(value, torch.Tensor) and value.dim() > 0 for value in state.values()
                )
                most, lacking = max(most, held), lacking + (held < (tensors or 1))
    # An optimizer of another package may have no state. It makes state if some parameters have state already.
    if not lacking or not (tensors or (tensors is None and most)):
        return Doing(None, type_name(optimizer))
    size = None if tensors is None else tensors * own
    return Doing("optimizer state", type_name(optimizer), size)


def _tensors_of_state(torch: Any, optimizer: Any) -> int | None:
    """Return the number of tensors of state for each parameter; ``None`` for optimizers of other packages."""
    name = type_name(optimizer)
    # A subclass can keep other state.
    if type(optimizer) is not getattr(torch.optim, name, None) or name not in _STATE_TENSORS:
        return None
    options = optimizer.param_groups[0]
    if name == "SGD":
        return int(bool(options.get("momentum")))
    more = ("amsgrad", "centered") if name != "RMSprop" else ("centered", "momentum")
    return _STATE_TENSORS[name] + sum(bool(options.get(option)) for option in more)


def _of_buckets(torch: Any, frame: FrameType, device: int) -> Doing:
    owner = dict(variables_of(frame)).get("self")
    if not is_kind(owner, torch.nn.Module):
        return Doing()
    gradients = [
        parameter
        for parameter in owner.parameters()  # type: ignore[attr-defined] # a module
        if parameter.requires_grad and is_on(parameter, device)
    ]
    return Doing("DDP buckets", None, sum(map(size_of, gradients)) or None)


def _moved(torch: Any, frames: Sequence[FrameType]) -> Any:
    """Return the module that ``to`` or ``cuda`` moves to another device; ``None``: there is none."""
    for frame in frames:
        code = frame.f_code
        if code.co_name in ("to", "cuda") and code.co_filename.endswith(_MODULE):
            owner = dict(variables_of(frame)).get("self")
            return owner if is_kind(owner, torch.nn.Module) else None
    return None


def _copied(frames: Sequence[FrameType], models: _Models, requested: int) -> Doing:
    """Return ``copy of the model`` if the program copies a model's weights on the device.

    It does if ``copy.deepcopy`` copies a parameter, or if the program's line copies a tensor, and one of its
    variables is a parameter or buffer of the requested size.
    """
    for frame in frames:
        if frame.f_code.co_name == "__deepcopy__" and frame.f_code.co_filename.endswith(_PARAMETER):
            weight = dict(variables_of(frame)).get("self")
            return Doing("copy of the model", "copy.deepcopy", models.size_with(weight))
    inner = _innermost(frames)
    if inner is None or not _COPIES.search(source_of(frames)):
        return Doing()
    for _, value in variables_of(inner):
        size = models.size_with(value)
        # The driver is asked for a whole segment.
        if size is not None and _segment(size_of(value)) == requested:
            return Doing("copy of the model", "state_dict", size)
    return Doing()


def _segment(size: int) -> int:
    """Return the bytes that torch's allocator asks the driver for, to allocate ``size`` bytes."""
    if size <= _SMALL:
        return SMALL_SEGMENT
    if size < _LARGE:
        return _LARGE_SEGMENT
    return -(-size // _ROUND) * _ROUND


def _cache(torch: Any, frames: Sequence[FrameType], device: int, names: re.Pattern[str]) -> int:
    """Return the bytes of the largest cache of keys and values among the variables of the functions."""
    largest = 0
    for frame in program_frames(reversed(frames)):
        for name, value in variables_of(frame):
            if names.match(name):
                held = sizes_of(
                    tensor for tensor in _tensors(torch, value) if is_on(tensor, device)
                )
                largest = max(largest, sum(held.values()))
    return largest


def _tensors(torch: Any, value: object) -> Iterator[Any]:
    """Yield the tensors in a value, in its items, and in its attributes, at any depth up to `_DEPTH`."""
    return tensors_in(torch, value, _inside, depth=_DEPTH, most=_VALUES)


def _inside(value: object) -> Sequence[object]:
    container: Any = value
    if is_kind(value, dict):
        return list(dict.values(container))[:_ITEMS]
    for kind in (list, tuple):
        if is_kind(value, kind):
            return list(kind.__iter__(container))[:_ITEMS]
    own = None if isinstance(value, type) else instance_dict(value)
    return [] if own is None else list(own.values())[:_ITEMS]


class _Models:
    """Modules that the running functions use: those that run, and those in variables of the program."""

    def __init__(self, torch: Any, frames: Sequence[FrameType], device: int) -> None:
        self._torch = torch
        owners: list[Any] = [
            frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "_call_impl"
        ]
        running = [owner for owner in owners if is_kind(owner, torch.nn.Module)]
        held = (
            value for frame in program_frames(reversed(frames)) for _, value in variables_of(frame)
        )
        modules = [*running, *(value for value in held if is_kind(value, torch.nn.Module))]
        # `copy.deepcopy` has a module without anything in it until the copies of its parts are made.
        modules = [module for module in modules if "_parameters" in (instance_dict(module) or {})]
        self.is_training = bool(running) and bool(running[0].training)
        self._weights: list[dict[int, int]] = []
        """Bytes of each module's weights, by address."""
        self._gradients: dict[int, int] = {}
        for module in {id(module): module for module in modules}.values():
            weights = [weight for weight in _weights(module) if is_on(weight, device)]
            self._weights.append(sizes_of(weights))
            self._gradients |= sizes_of(
                weight.grad for weight in weights if weight.grad is not None
            )

    @property
    def size(self) -> int | None:
        """Bytes of parameters, buffers and gradients; ``None`` if no module is known."""
        every = dict(self._gradients)
        for weights in self._weights:
            every |= weights
        return sum(every.values()) or None

    @property
    def addresses(self) -> set[int]:
        """Addresses of parameters, buffers and gradients."""
        return {*self._gradients, *(address for weights in self._weights for address in weights)}

    def size_with(self, value: object) -> int | None:
        """Return the bytes of the weights of the largest module that has a tensor among its weights.

        Return ``None`` if no module has it, or if ``value`` is no tensor.
        """
        if not is_kind(value, self._torch.Tensor):
            return None
        own = address(value)
        return max(
            (sum(weights.values()) for weights in self._weights if own in weights), default=None
        )


def _weights(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


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
    # `walk_stack` begins with the innermost frame.
    own = [frame for frame, _ in walk_stack(outside) if frame.f_code.co_filename != left_out][::-1]
    if in_backward() and all(frame.f_code.co_name != _BACKWARD for frame in own):
        return [*_caller_of_backward(), *own]
    return own


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
            # The modules so far have called the backward pass. They do not run in it.
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
    optimizer = None
    for frame in frames:
        if frame.f_code.co_name == "step":
            owner = frame.f_locals.get("self")
            optimizer = owner if isinstance(owner, torch.optim.Optimizer) else optimizer
    return optimizer


def _path(modules: list[Any]) -> str | None:
    if not modules:
        return None
    root, layer = modules[0], modules[-1]
    named = (path for path, module in root.named_modules() if module is layer)
    path = next(named, None)
    kind = type(layer).__name__
    return f"{path} ({kind})" if path else kind


_KIB = 1024


class Headroom(NamedTuple):
    """Used and free memory under one limit, in bytes; ``None`` if unknown."""

    used: int | None
    """Bytes in use by all processes under the limit when this process's memory use was highest."""
    free: int | None
    """Bytes that were free at the time of this process's highest memory use."""
    free_after: int | None
    """Bytes that were free after the failed step's memory was released."""
    limit: int | None
    limited_by: str | None


UNKNOWN_HEADROOM = Headroom(None, None, None, None, None)


def host_headroom() -> Headroom:
    """Return the headroom with the fewest free bytes.

    The candidates are the headrooms of the process's address space, of its control group, and of the machine.
    """
    memory = _own_memory()
    headrooms = [_address_space(memory), _cgroup(memory), _machine(memory)]
    known = [headroom for headroom in headrooms if headroom.limit is not None]
    return min(known, key=lambda headroom: headroom.free or 0, default=UNKNOWN_HEADROOM)


def highest_resident() -> int | None:
    """Return the largest resident set size of this process so far, in bytes; ``None`` if unknown."""
    return _own_memory().get("VmHWM")


def _own_memory() -> dict[str, int]:
    """Return the kernel's figures of this process, such as ``VmPeak``, in bytes."""
    figures: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Vm"):
                # The kernel writes kB for KiB.
                figures[name] = int(rest.split()[0]) * _KIB
    return figures


def _address_space(memory: dict[str, int]) -> Headroom:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used, peak = memory.get("VmSize"), memory.get("VmPeak")
    if limit == resource.RLIM_INFINITY or used is None or peak is None:
        return UNKNOWN_HEADROOM
    name = "the limit on the process's address space (ulimit -v)"
    after = max(limit - used, 0)
    if peak > limit:  # the limit was lowered later; the highest use since then is unknown
        return Headroom(None, None, after, limit, name)
    return Headroom(peak, limit - peak, after, limit, name)


def _cgroup(memory: dict[str, int]) -> Headroom:
    reading = read_cgroup(os.getpid())
    if reading.used is None or reading.limit is None:
        return UNKNOWN_HEADROOM
    name = "the memory limit of the container (cgroup)"
    return _of_pages(reading.used, reading.limit, memory, name)


def _machine(memory: dict[str, int]) -> Headroom:
    free, total = available_memory(), machine_memory()
    if free is None or total is None:
        return UNKNOWN_HEADROOM
    return _of_pages(total - free, total, memory, "the machine's memory")


def _of_pages(used: int, limit: int, memory: dict[str, int], name: str) -> Headroom:
    """Return the headroom under a limit that other processes share.

    The kernel does not record the highest use by all processes together. memlog estimates it: the current use
    by all processes, plus the difference between this process's largest and current resident set size.
    """
    given_back = max(memory.get("VmHWM", 0) - memory.get("VmRSS", 0), 0)
    after = max(limit - used, 0)
    highest = min(used + given_back, limit)
    return Headroom(highest, limit - highest, after, limit, name)
