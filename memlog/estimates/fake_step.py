"""A training step on fake tensors, traced."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

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
    """Keep objects from before the block out of garbage collections, which look at each object.

    A process with torch has half a million of them, and what a step makes is new. If the program keeps
    objects out itself, they stay out, and the others are looked at.
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
    """Trace a step after one that is not traced, which makes the optimizer's state.

    Call it inside the mode of the fake tensors that ``model`` and ``optimizer`` have.

    Args:
        step: Function that makes one training step.
        model: The model; ``None``: the first module that is called.
        optimizer: Its optimizer, if it is made already.
        device: Device on which operations behave as they would; ``None``: as on the CPU, without workspaces.

    Raises:
        ConfigurationError: The memory can't be known: the step uses a tensor's value, or has too many events.
    """
    with reasons(), all_on_cpu(), _BEHAVIOUR[device](), unknown_values():
        step()
        gc.collect()  # what stays is counted
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
    """Give errors of fake tensors a message that says what can't be known."""
    try:
        with warnings.catch_warnings():
            # torch's own copy.deepcopy of a layer asks for it.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    except (ValueUsedError, DataDependentOutputException, DynamicOutputShapeException) as error:
        operation = f" ({error})" if str(error) else ""
        raise ConfigurationError(
            f"{_place(error)}what happens next depends on a tensor's value{operation}, and an estimate "
            "computes none: leave that out of the step; loss.item() may be printed and calculated with"
        ) from error
    except UnsupportedOperatorException as error:
        raise ConfigurationError(
            f"{_place(error)}the operation {error} does not say which shapes it returns, so what it "
            "allocates can't be known: register a fake implementation (torch.library.register_fake)"
        ) from error
    except (AssertionError, RuntimeError) as error:
        if "not compiled with CUDA" not in str(error):
            raise
        raise ConfigurationError(
            f"{_place(error)}this call needs a CUDA device, and an estimate has none: leave it out"
        ) from error


def _place(error: BaseException) -> str:
    """Return the file and the line of the program that led to an error, as the begin of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES)
        and not frame.filename.startswith("<")
    ]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""
