"""Trace of a training step on fake tensors."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from memlog.errors import ConfigurationError
from memlog.estimates.as_on_cuda import as_on_cuda
from memlog.estimates.cpu_workspaces import measured_on_small_batches
from memlog.estimates.device_names import all_on_cpu
from memlog.estimates.unknown_values import ValueUsedError, unknown_values
from memlog.trace.records import RecordedTrace
from memlog.tracer.window import TraceWindow

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])
MAX_EVENTS = 2_000_000
_BEHAVIOUR: dict[str | None, Callable[[], AbstractContextManager[None]]] = {
    "cuda": as_on_cuda,
    "cpu": measured_on_small_batches,
    None: nullcontext,
}


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
    optimizer: Optimizer | None,
    *,
    device: Literal["cuda", "cpu"] | None,
) -> RecordedTrace:
    """Run one training step to make the optimizer's state, then trace a second step.

    Call it inside a `FakeMode`. The tensors of ``model`` and ``optimizer`` belong to this mode. If ``model``
    is ``None``, the model is the first module that is called. ``optimizer`` is ``None`` if the optimizer is
    not known before the step. Operations behave as on ``device``. If ``device`` is ``None``, operations
    behave as on the CPU, but their workspaces are not measured.

    Raises:
        ConfigurationError: The step branches on a tensor's value, or has too many events.
    """
    with reasons(), all_on_cpu(), _BEHAVIOUR[device](), unknown_values():
        step()
        gc.collect()  # the trace would count garbage as memory in use
        window = TraceWindow(
            model,
            optimizers=() if optimizer is None else (optimizer,),
            device="cpu",
            engine="dispatch",
            max_events=MAX_EVENTS,
        )
        window.start()
        try:
            step()
        finally:
            trace = window.stop()
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
            yield
    except (ValueUsedError, DataDependentOutputException, DynamicOutputShapeException) as error:
        # float(), int() and bool() are one operation, whose name tells users nothing.
        if str(error) and "_local_scalar_dense" not in str(error):
            raise ConfigurationError(
                f"{_place(error)}the operation {error} depends on a tensor's values, but an estimate "
                "computes none: leave it out of the step, or use one whose result always has the same size, "
                "such as torch.where instead of a mask in brackets"
            ) from error
        raise ConfigurationError(
            f"{_place(error)}the step decides by a tensor's value, but an estimate computes no values: write "
            "loss.item() instead of float(loss) to print it or calculate with it, and leave code that "
            "decides by it out of the step"
        ) from error
    except UnsupportedOperatorException as error:
        raise ConfigurationError(
            f"{_place(error)}the operation {error} does not say which shapes it returns, so what it "
            "allocates can't be known: leave it out of the step, or register a fake implementation "
            "(torch.library.register_fake)"
        ) from error
    except (AssertionError, RuntimeError) as error:
        if "not compiled with CUDA" not in str(error):
            raise
        raise ConfigurationError(
            f"{_place(error)}this call needs a CUDA device, and an estimate has none: leave it out"
        ) from error


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
