"""Trace of one window in time, and the selection of the engine that records it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError
from memlog.torchside import internals
from memlog.trace.accounting import Accountant
from memlog.trace.records import EngineChoice, EngineName, Exactness, RecordedTrace
from memlog.trace.result import TraceFacts, build
from memlog.tracer.engines import base, dispatch_mode
from memlog.tracer.engines.base import Engine, SamplerEngine
from memlog.tracer.engines.cpu import DispatchEngine
from memlog.tracer.engines.cuda import AllocatorHistory, NativeEngine
from memlog.tracer.engines.storage_events import EventLog
from memlog.tracer.module_names import ModuleNames

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
            # A tensor without bytes counts with 0, so that its device is known if no tensor has bytes.
            nothing = is_lazy(tensor) or tensor.device.type == "meta"
            sizes[_with_index(tensor.device)] += 0 if nothing else tensor.nbytes
    return sizes


def _with_index(device: torch.device) -> torch.device:
    kind = device.type
    if kind in ("cuda", "xpu") and str(device) == kind:
        module: Any = getattr(torch, kind)
        return torch.device(kind, module.current_device())
    return device


def choose_engine(
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


def build_engine(
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


_COMPILED = "The model is compiled: there are no layers inside it."


def may_open() -> bool:
    """Return whether hooks may open a window on this thread.

    The dispatch mode of such a window is added in one hook and removed in another. This mode would not nest
    with the user's own modes, so a window opens only if no mode is active. A window does not open while a
    graph is compiled, or in a backward pass. It does not open in a transformation of ``torch.func``, in which
    tensors have no storage. It also does not open while ``torch.jit.trace`` records a graph: this function
    records the model twice, and compares the two graphs.
    """
    if torch.compiler.is_compiling() or internals.backward_task() != internals.NO_TASK:
        return False
    if internals.tracing_graph() or internals.in_functorch_transform():
        return False
    if internals.missing():
        return True  # the sampler runs instead of the dispatch engine, and needs no mode
    return not internals.mode_stack()


class TraceWindow:
    """Trace of everything between `start` and `stop`. Hooks may call both.

    Args:
        model: A ``torch.nn.Module``. ``None``: the first module that is called.
        others: Further root modules. No other module calls a root module. The window finds all other root
            modules when they are called.
        optimizers: Optimizers whose state exists already. The window finds all other optimizers when they
            step.
        known: Further optimizers that exist. They only tell which networks are trained.
        device: Device as torch writes it. ``None``: the device that holds most of the model.
        engine: ``"auto"``, or the name of an engine.
        max_events: Maximum number of events to keep individually.
        readings: On a GPU, True to read the allocator's statistics at every change of layer.
        diagnostics: Counter of the tracer's own errors. ``None``: a new counter.
        types: True to find out the type of each storage under autocast, for `memlog advise`. Tracing is then
            about a fifth slower.
        most_events: Number of events after which the window stops recording and waits to be closed. ``None``:
            no limit.
        most_seconds: Seconds of memlog's own code after which the window stops recording and waits to be
            closed. ``None``: no limit.
        read_users_history: False if an allocator history that the user's program records would take too long
            to read. The sampler then runs.

    Attributes:
        health: Counter of the tracer's own errors.
        torch_device: Device that is traced.
        choice: Engine that runs, and the reason for it.

    Raises:
        ConfigurationError: The device does not exist, or the engine can't trace it.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        others: Sequence[Any] = (),
        optimizers: Sequence[Any] = (),
        known: Sequence[Any] = (),
        device: str | None = None,
        engine: EngineChoice = "auto",
        max_events: int = 100_000,
        readings: bool = True,
        diagnostics: Diagnostics | None = None,
        types: bool = False,
        most_events: int | None = None,
        most_seconds: float | None = None,
        read_users_history: bool = True,
    ) -> None:
        self.health = diagnostics if diagnostics is not None else Diagnostics()
        models = [module for module in (model, *others) if module is not None]
        self.torch_device = device_of(models, device)
        self._other_devices = other_devices(models, self.torch_device)
        self._compiled = are_compiled(models)
        self.choice = choose_engine(
            self.torch_device,
            engine,
            compiled=self._compiled,
            read_users_history=read_users_history,
        )
        self._names = ModuleNames(
            model,
            others,
            (*known, *optimizers),
            None if most_seconds is None else most_seconds / 2,
        )
        self._accountant = Accountant(
            by_readings=self.choice.engine == "sampler", layers_around=self._names.layers_around
        )
        self._log = EventLog(max_events, self._accountant, most_events, most_seconds)
        self._engine = build_engine(
            self.choice,
            self.torch_device,
            self._log,
            self._names,
            self.health,
            readings=readings,
            types=types,
            read_users_history=read_users_history,
        )
        self._optimizers = optimizers
        self._log.on_overflow = self._engine.stop_recording
        self._trace: RecordedTrace | None = None

    def roots(self) -> list[Any]:
        """Return the root modules in the order in which the window found them."""
        return [
            module for module in (root.module() for root in self._names.roots) if module is not None
        ]

    @property
    def search_skipped(self) -> bool:
        """True if `roots` may be parts of other modules: a search for these would have taken too long."""
        return self._names.search_skipped

    def known_optimizers(self) -> list[Any]:
        """Return the optimizers that are known to the window. Some of them may never have stepped."""
        return self._names.known_optimizers()

    def start(self) -> None:
        """Open the window on this thread."""
        self._log.begin()
        try:
            self._engine.start(self._optimizers)
            self._optimizers = ()
        except BaseException:
            # Some hooks may be installed already.
            self._engine.stop()
            raise

    @property
    def overflowed(self) -> bool:
        """True if the window stopped recording because it reached ``most_events``."""
        return self._log.overflowed

    @property
    def seconds(self) -> float:
        """Seconds that memlog's own code has taken in the window."""
        return self._log.seconds

    @property
    def lost(self) -> bool:
        """True if the window's events can't be read, because the program records a history of its own now."""
        return isinstance(self._engine, NativeEngine) and self._engine.lost

    def took(self, seconds: float) -> None:
        """Count ``seconds`` that opening the window took."""
        self._log.took(seconds)

    @property
    def cut(self) -> bool:
        """True if the window stopped recording because it reached ``most_seconds``."""
        return self._log.cut

    def module_begins(self, module: Any, args: Any) -> None:
        """Record the begin of the module call in which the window was opened.

        torch does not call the window's hooks for that call, because `start` added the hooks after the call
        began.
        """
        with self.health.contained("noticing that a module begins"):
            self._engine.module_begins(module, args)

    def stop(self) -> RecordedTrace:
        """Close the window and analyse it. A second call returns the same trace.

        All hooks are removed, but the dispatch mode may stay. `leave` removes the mode.
        """
        if self._trace is None:
            # The end of the recording: `stop` takes time of its own.
            duration_ns = self._log.now()
            report = self._engine.stop()
            events, kept = self._log.close()
            facts = TraceFacts(
                engine=self.choice.engine,
                why=self.choice.why,
                device=str(self.torch_device),
                exactness=report.exactness or self.choice.exactness,
                started_us=self._log.began_us,
                duration_ns=duration_ns,
                events=self._log.events,
                kept_events=kept,
                dropped=self._dropped(report.dropped),
                unseen=(*self._limitations(), *report.unseen),
                fragmentation=report.fragmentation,
                fragmentation_reason=report.fragmentation_reason,
                lines=report.lines,
            )
            paths = self._names.final_paths()
            result = build(self._accountant, paths, facts)
            self._trace = RecordedTrace(
                result,
                paths,
                events,
                kinds=tuple(self._names.kinds),
                optimizers=tuple(self._names.optimizers),
                lines=report.lines,
            )
        return self._trace

    def serials(self, tensors: Iterable[Any]) -> dict[int, int]:
        """Return the serial numbers of the tensors' storages by the storages' identity.

        Storages that are not tracked are left out. Only the engine ``dispatch`` tracks storages.
        """
        engine = self._engine
        return engine.serials(tensors) if isinstance(engine, DispatchEngine) else {}

    @property
    def streams(self) -> dict[int, int]:
        """Streams of storages by their serial numbers, if an estimate allocates for several streams."""
        return self._engine.streams if isinstance(self._engine, DispatchEngine) else {}

    @property
    def elsewhere(self) -> int:
        """Highest number of bytes of the tensors that an estimate's trace leaves out."""
        return self._log.elsewhere

    def abandon(self) -> None:
        """Close the window without analysing it."""
        self._engine.stop()

    def leave(self) -> bool:
        """Remove the dispatch mode if `stop` could not remove it.

        Return True if nothing of the window is left in torch.
        """
        return self._engine.leave()

    def _limitations(self) -> Iterator[str]:
        if self._compiled:
            yield _COMPILED
        if self._other_devices:
            others = ", ".join(self._other_devices)
            yield (
                f"The model also has parameters on {others}. This trace is of {self.torch_device} alone: "
                "`memlog.MemoryTracer(device=…)` traces another device."
            )

    def _dropped(self, dropped: dict[str, int]) -> dict[str, int]:
        counts = dict(dropped)
        if self._names.omitted:
            counts["modules past the limit of names"] = self._names.omitted
        if self._accountant.unmatched_frees:
            counts["frees of memory whose allocation was not seen"] = (
                self._accountant.unmatched_frees
            )
        if self.health.faults:
            counts["errors inside the tracer"] = sum(self.health.faults.values())
        return counts
