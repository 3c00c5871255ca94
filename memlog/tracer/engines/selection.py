"""Selection of the engine for a device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError
from memlog.trace.records import EngineChoice, EngineName, Exactness
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.engines import base
from memlog.tracer.engines.base import Engine, SamplerEngine
from memlog.tracer.engines.cpu import dispatch_mode
from memlog.tracer.engines.cpu.engine import DispatchEngine
from memlog.tracer.engines.cuda.allocator_history import AllocatorHistory
from memlog.tracer.engines.cuda.engine import NativeEngine
from memlog.tracer.event_log import EventLog

_COMPILED_ON_CPU = (
    "the model is compiled, and with this torch observing operations would make it run uncompiled"
)


class ChosenEngine(NamedTuple):
    engine: EngineName
    why: str
    exactness: Exactness


def device_of(models: Sequence[Any], named: str | None) -> torch.device:
    """Return the device to trace.

    ``named``: Device as torch writes it. ``None``: the device on which the models' parameters and buffers
    have most bytes. If there is no parameter or buffer, return a CUDA device that is in use, or else the CPU.

    Raises:
        ConfigurationError: The device does not exist.
    """
    if named is not None:
        return _with_index(_parsed(named))
    sizes = _bytes_by_device(models)
    return max(sizes, key=lambda device: sizes[device]) if sizes else _with_index(_in_use())


def other_devices(models: Sequence[Any], traced: torch.device) -> list[str]:
    """Return the accelerators, other than the traced one, that hold parameters or buffers of the models."""
    devices = {str(device) for device in _bytes_by_device(models) if device != traced}
    return sorted(devices - {"cpu", "meta"})


def _bytes_by_device(models: Sequence[Any]) -> Counter[torch.device]:
    """Return the bytes of the models' parameters and buffers by device, the device of the first one first."""
    sizes = Counter[torch.device]()
    for model in models:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            nothing = is_lazy(tensor) or tensor.device.type == "meta"
            sizes[_with_index(tensor.device)] += 0 if nothing else tensor.nbytes
    return sizes


def _with_index(device: torch.device) -> torch.device:
    kind = device.type
    if kind in ("cuda", "xpu") and str(device) == kind:
        module: Any = getattr(torch, kind)
        return torch.device(kind, module.current_device())
    return device


def choose(
    device: torch.device,
    wanted: EngineChoice,
    *,
    compiled: bool,
    read_users_history: bool = True,
) -> ChosenEngine:
    """Return the engine for a device.

    ``compiled``: True if a part of the models was passed to ``torch.compile``. ``read_users_history``: False
    to leave an allocator history that the user's program records unread.

    Raises:
        ConfigurationError: The engine that the user asked for (``wanted``) can't trace the device.
    """
    best: EngineName
    if device.type in ("cuda", "xpu"):
        best, refusal = "native", AllocatorHistory(device, read_users=read_users_history).refusal()
    elif device.type == "cpu":
        uncompiled = compiled and not dispatch_mode.leaves_code_compiled()
        best, refusal = "dispatch", _COMPILED_ON_CPU if uncompiled else dispatch_mode.refusal()
    else:
        best, refusal = "sampler", None
    if wanted not in ("auto", "sampler"):
        if wanted != best:
            raise ConfigurationError(
                f"engine={wanted!r} can't trace {device.type}; leave it at 'auto', or use 'sampler'"
            )
        if refusal not in (None, _COMPILED_ON_CPU):
            raise ConfigurationError(f"engine={wanted!r} can't run: {refusal}; leave it at 'auto'")
        return ChosenEngine(best, "you chose it", "exact")
    if wanted == "auto" and refusal is None and best != "sampler":
        return ChosenEngine(best, f"the best for {device.type}", "exact")
    readable = base.reader(device) is not None
    why = "you chose it" if wanted == "sampler" else refusal or f"the only one for {device.type}"
    return ChosenEngine("sampler", why, "sampled" if readable else "none")


def build(
    choice: ChosenEngine,
    device: torch.device,
    log: EventLog,
    names: ModuleNames,
    diagnostics: Diagnostics,
    *,
    readings: bool,
    types: bool,
    read_users_history: bool,
) -> Engine:
    """Create the chosen engine, but do not start it. `memlog.tracer.window` explains the arguments."""
    if choice.engine == "native":
        history = AllocatorHistory(device, read_users=read_users_history)
        return NativeEngine(log, names, diagnostics, history, readings=readings)
    if choice.engine == "dispatch":
        return DispatchEngine(log, names, diagnostics, types=types)
    return SamplerEngine(log, names, diagnostics, device)


def are_compiled(models: Sequence[Any]) -> bool:
    """Return whether a part of the models was passed to ``torch.compile``."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for model in models
        for module in model.modules()
    )


def _in_use() -> torch.device:
    cuda: Any = torch.cuda
    return torch.device("cuda" if cuda.is_initialized() and cuda.memory_allocated() else "cpu")


def _parsed(named: str) -> torch.device:
    try:
        device = torch.device(named)
    except RuntimeError:
        raise ConfigurationError(
            f"device={named!r} is not a torch device; write 'cpu', 'cuda' or 'cuda:0'"
        ) from None
    if device.type in ("cuda", "xpu"):
        module: Any = getattr(torch, device.type)
        if not module.is_available():
            raise ConfigurationError(
                f"device={named!r}: this machine has no {device.type.upper()} device; "
                "leave device out to trace the model's device"
            )
        if (device.index or 0) >= module.device_count():
            raise ConfigurationError(
                f"device={named!r}: this machine has {module.device_count()} such devices; count from 0"
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError(
            "device='mps': this machine has none; leave device out to trace the model's device"
        )
    return device
