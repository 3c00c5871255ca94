"""Trace of a training step on fake tensors.

Sizes are those of tensors alone. Workspaces of operations and bytes that an allocator adds are not included.
`memlog.estimate` includes them.
"""

from __future__ import annotations

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import MIB
from memlog.errors import ConfigurationError
from memlog.estimates.as_on_cuda import as_on_cuda
from memlog.estimates.cpu_workspaces import measured_on_small_batches
from memlog.estimates.ctc_of_lists import ctc_of_lists
from memlog.estimates.cuda_kernels.reductions import Gpu
from memlog.estimates.device_memory import TracedTraining, host_tensors, moved_together
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.fakes import Fakes, needs_other_processes
from memlog.estimates.places import ON_HOST, Places, all_on_cpu
from memlog.estimates.unknown_values import ArrayMadeError, ValueUsedError, unknown_values
from memlog.torchside import internals
from memlog.torchside.compiled_code import planned_by_inductor
from memlog.torchside.fakes import (
    FAKES_FOLDER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from memlog.trace.accounting import PhaseName, phase_levels
from memlog.trace.records import RecordedTrace
from memlog.tracer.tensor_storages import tensors_in
from memlog.tracer.window import TraceWindow

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_OPTIMIZERS = Path(torch.optim.__file__).parent
MAX_EVENTS = 2_000_000
_REASONS = {
    "not compiled with CUDA": (
        "this call needs a CUDA device, and an estimate has none: leave it out"
    ),
    "If capturable=True": (
        "an optimizer with capturable=True can't be estimated: leave capturable=True out for the estimate"
    ),
    "Cannot access storage of": (
        "what torch.func.vmap and torch.func.grad allocate can't be estimated: leave them out of "
        "the step, for example by a loop over some samples"
    ),
}
"""What an estimate can't do, by a part of torch's error."""
_OTHER_THREAD = (
    "the step calls the model on another thread ({}), but an estimate follows one thread: call the model on "
    "the thread that runs the step"
)


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Let garbage collections inside the block look only at objects that are made inside it.

    A process with torch has half a million older objects. None of them becomes garbage in a step. If the
    program has called ``gc.freeze`` itself, nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def traced_step(
    step: Callable[[], object],
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    *,
    measure: bool,
) -> RecordedTrace:
    """Run one training step to make the optimizer's state, then trace a second step, on the CPU.

    Call it inside a `FakeMode`. The tensors of ``model`` and ``optimizers`` belong to this mode. If ``model``
    is ``None``, the model is the first module that is called. ``optimizers`` is empty if they
    are not known before the step. If ``measure`` is true, workspaces of operations are measured.

    Raises:
        ConfigurationError: The step branches on a tensor's value, or has too many events.
    """
    measuring = measured_on_small_batches() if measure else nullcontext()
    with (
        reasons(),
        _on_one_thread(model),
        all_on_cpu(),
        measuring,
        ctc_of_lists(),
        unknown_values(),
    ):
        step()
        gc.collect()  # the trace would count garbage as memory in use
        window = _window(model, optimizers)
        window.start()
        try:
            step()
        finally:
            trace = window.stop()
    return _complete(trace)


def traced_training(
    step: Callable[[], object],
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    gpu: Gpu,
    places: Places,
) -> TracedTraining:
    """Trace the first two training steps, with operations that behave as on a CUDA device.

    The arguments, and what is raised, are as for `traced_step`. The second step stands for all later ones.
    """
    stepped: list[Optimizer] = []
    called: set[type] = set()
    hooks = (
        register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer)),
        register_module_forward_pre_hook(lambda module, _: called.add(type(module))),
    )
    try:
        with (
            reasons(),
            _on_one_thread(model),
            all_on_cpu(places),
            as_on_cuda(gpu, places),
            unknown_values(),
        ):
            if model is not None:
                places.train((*model.parameters(), *model.buffers()))
            # Inside `asking`, all tensors are on the CPU, as the window needs them.
            with places.asking(None):
                window = _window(model, optimizers)
            window.start()
            try:
                set_up = tuple(
                    tuple(window.serials(together).values()) for together in moved_together(model)
                )
                step()
                gc.collect()  # the next trace would count garbage as memory in use
                # The two windows number storages differently. The tensors alive between the steps link both
                # numberings.
                between = internals.live_fakes()
                before = window.serials(between)
                for tensor in host_tensors(stepped):
                    places.put(tensor, ON_HOST)
            finally:
                first = window.stop()
            on_host, streams = window.elsewhere, window.streams
            with places.asking(None):
                window = _window(model, optimizers)
            window.start()
            try:
                after = window.serials(between)
                # Otherwise this list would keep the tensors alive in the second step.
                del between
                step()
            finally:
                later = window.stop()
    finally:
        for hook in hooks:
            hook.remove()
    on_host = max(on_host, window.elsewhere)
    same = {after[storage]: before[storage] for storage in after.keys() & before.keys()}
    recurrent = any(issubclass(kind, nn.RNNBase) for kind in called)
    traces = _complete(first), _complete(later)
    of_steps = streams, window.streams
    return TracedTraining(*traces, set_up, same, on_host, recurrent, of_steps)


class _Faults(Diagnostics):
    """Errors inside the tracer. Those that a fake tensor raises are not logged: the step ends with them."""

    def fault(self, where: str, error: BaseException) -> None:
        if isinstance(error, ConfigurationError):
            self.count_fault(where)
        else:
            super().fault(where, error)


def _window(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> TraceWindow:
    return TraceWindow(
        model,
        optimizers=optimizers,
        diagnostics=_Faults(),
        device="cpu",
        engine="dispatch",
        max_events=MAX_EVENTS,
    )


def _complete(trace: RecordedTrace) -> RecordedTrace:
    if trace.result.peak is None or trace.result.truncated:
        raise ConfigurationError(
            f"the step has more than {MAX_EVENTS:,} events, too many for an estimate: shorten it"
        )
    return trace


@contextmanager
def reasons() -> Iterator[None]:
    """Convert errors of fake tensors to `ConfigurationError`, with messages that say what can't be known."""
    try:
        with warnings.catch_warnings():
            # torch itself reads the data pointer when copy.deepcopy copies a layer.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings(
                "ignore", "Using `torch.compile.module.` when there are global hooks"
            )
            # ``float(loss)`` is refused below; torch's warning would name a line of memlog.
            warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
            yield
    except (ValueUsedError, DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(_place(error) + _value_needed(error)) from error
    except ArrayMadeError as error:
        raise ConfigurationError(
            f"{_place(error)}the step makes a NumPy array of a tensor, but an estimate computes no values: "
            "leave it out of the step"
        ) from error
    except UnsupportedOperatorException as error:
        raise ConfigurationError(
            f"{_place(error)}the operation {error} does not say which shapes it returns, so what it "
            "allocates can't be known: leave it out of the step, or register a fake implementation "
            "(torch.library.register_fake)"
        ) from error
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = next((text for part, text in _REASONS.items() if part in str(error)), None)
        reason = reason or needs_other_processes(error)
        if reason is None:
            raise
        raise ConfigurationError(f"{_place(error)}{reason}") from error


@contextmanager
def _on_one_thread(model: nn.Module | None) -> Iterator[None]:
    """Refuse a step that calls the model on another thread, where torch does not use fake tensors."""
    here, known = (
        threading.get_ident(),
        frozenset(map(id, () if model is None else model.modules())),
    )
    elsewhere: list[str] = []

    def note(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() != here and id(module) in known:
            elsewhere.append(threading.current_thread().name)

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    except Exception as error:
        if not elsewhere:
            raise
        raise ConfigurationError(_OTHER_THREAD.format(elsewhere[0])) from error
    finally:
        hook.remove()
    if elsewhere:
        raise ConfigurationError(_OTHER_THREAD.format(elsewhere[0]))


def _value_needed(error: Exception) -> str:
    """Return the reason of an error because a step needs the value of a tensor."""
    # float(), int() and bool() are one operation, whose name tells users nothing.
    if str(error) and "_local_scalar_dense" not in str(error):
        return (
            f"the operation {error} depends on a tensor's values, but an estimate "
            "computes none: leave it out of the step, or use one whose result always has the same size, "
            "such as torch.where instead of a mask in brackets"
        )
    elsewhere = needs_other_processes(error)
    if elsewhere:
        return elsewhere
    deciding = _optimizer_that_raised(error)
    if deciding:
        return (
            f"the optimizer of torch.optim.{deciding} decides by a tensor's value, but an estimate computes "
            "no values: estimate the step with an optimizer that decides by none, such as torch.optim.SGD"
        )
    called = _called_in_torch(error)
    if called.startswith("torch.distributions."):
        return (
            f"{called} checks the values of its arguments, but an estimate computes no values: pass "
            "validate_args=False"
        )
    if called:
        return (
            f"{called} decides by a tensor's value, but an estimate computes no values: leave it out of the "
            "step"
        )
    needs, remedy = (
        ("decides by", "leave the decision out, and estimate the branch that needs more memory")
        if isinstance(error, ValueUsedError)
        else (
            "needs",
            "write loss.item() to print the value or calculate with it, and leave code that decides by it "
            "out of the step",
        )
    )
    return (
        f"this line {needs} a tensor's value, for a comparison, an if, or a conversion such as float(), but "
        f"an estimate computes no values: {remedy}"
    )


def _optimizer_that_raised(error: BaseException) -> str:
    """Return the module of torch's optimizer in which an error was raised; empty if it was elsewhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.parent == _OPTIMIZERS:
            # `optimizer.py` has only the base class of the optimizers.
            return "" if path.stem == "optimizer" else path.stem
        if not any(path.is_relative_to(folder) for folder in _LIBRARIES):
            return ""
    return ""


def _called_in_torch(error: BaseException) -> str:
    """Return the name of the function in torch's Python code that the program called; empty if there is none.

    Functions of tensors, such as ``float(tensor)``, do not count.
    """
    name = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_LIBRARIES[1]) or path.parent == _LIBRARIES[0]:
            continue
        if not path.is_relative_to(_LIBRARIES[0]):
            return name
        if not path.is_relative_to(_LIBRARIES[0] / FAKES_FOLDER):
            parts = path.relative_to(_LIBRARIES[0].parent).with_suffix("").parts
            name = ".".join(
                part for part in (*parts, frame.name) if part not in ("__init__", "utils")
            )
    return name


def _place(error: BaseException) -> str:
    """Return the file and the line of the program that led to an error, as the beginning of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES)
        and not frame.filename.startswith("<")
    ]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes that a training step takes when the optimizer's state already exists."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    data: int
    """Bytes of the batch: tensors made before the model's first call."""
    activations: int
    """Bytes of the tensors that the forward pass keeps for the backward pass, including the loss."""
    after_data: int
    after_forward: int
    after_backward: int
    after_optimizer: int
    peak: int

    def text(self) -> str:
        """Return the estimate as lines of text."""
        rows = {
            "Model weights": self.parameters + self.buffers,
            "Gradients": self.gradients,
            "Optimizer state": self.optimizer_state,
            "Input/output data": self.data,
            "Activations": self.activations,
            "After the data": self.after_data,
            "After forward": self.after_forward,
            "After backward": self.after_backward,
            "After the optimizer": self.after_optimizer,
            "Peak": self.peak,
        }
        return "\n".join(f"  {name + ':':20} {size / MIB:10.1f} MiB" for name, size in rows.items())


@only_new_objects()
def estimate_memory(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
    *,
    accumulate: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of a training step. Nothing is computed, and the model stays unchanged.

    Args:
        model: The model, which can be on the device ``meta``. Only its tensors' shapes and types matter.
        loss: Function that gets the model, makes a batch (``torch.randn(…)``) and returns the loss. It may
            use `torch.autocast` and ``checkpoint``, but not branch on a tensor's value.
        optimizer: Function that makes an optimizer from the parameters.
        accumulate: Number of batches whose gradients are added up before the optimizer's step.

    Raises:
        ConfigurationError: ``loss`` branches on a tensor's value.
    """
    mode = FakeMode()
    with Fakes(mode).replace(model), planned_by_inductor(), mode, reasons():
        steps = optimizer(model.parameters())
        gradients = 0

        def step() -> None:
            nonlocal gradients
            for _ in range(accumulate):
                loss(model).backward()
            gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
            steps.step()
            steps.zero_grad()

        trace = traced_step(step, model, (), measure=False)
        state = _size(tensors_in([dict(own) for own in steps.state.values()]))
        return _estimate(trace, model, state, gradients)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _estimate(trace: RecordedTrace, model: nn.Module, state: int, gradients: int) -> MemoryEstimate:
    levels = phase_levels(trace)
    if levels is None or trace.result.peak is None:
        raise ConfigurationError("the step's phases are unknown")
    at_start = trace.result.before or 0

    def after(name: PhaseName, default: int) -> int:
        return levels[name].after if name in levels else default

    after_data = after("data", at_start)
    after_forward = after("forward", after_data)
    after_backward = after("backward", after_forward)
    return MemoryEstimate(
        parameters=_size(model.parameters()),
        buffers=_size(model.buffers()),
        gradients=gradients,
        optimizer_state=state,
        data=after_data - at_start,
        activations=after_forward - after_data,
        after_data=after_data,
        after_forward=after_forward,
        after_backward=after_backward,
        after_optimizer=after("optimizer", after_backward),
        peak=trace.result.peak,
    )
