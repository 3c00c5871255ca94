"""A training step on fake tensors, traced."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from memlog.errors import ConfigurationError
from memlog.estimates.as_on_cuda import as_on_cuda
from memlog.estimates.cpu_workspaces import measured_on_small_batches
from memlog.estimates.unknown_values import unknown_values
from memlog.trace.records import RecordedTrace
from memlog.tracer.window import TraceWindow

MAX_EVENTS = 2_000_000
_BEHAVIOUR: dict[str | None, Callable[[], AbstractContextManager[None]]] = {
    "cuda": as_on_cuda,
    "cpu": measured_on_small_batches,
    None: nullcontext,
}


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors have shapes but no bytes, and operations convert real ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


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
    with reasons(), _BEHAVIOUR[device](), unknown_values():
        step()
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
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"the step uses a tensor's value ({error}), but an estimate computes none: remove that use"
        ) from error
    except UnsupportedOperatorException as error:
        raise ConfigurationError(
            f"the operation {error} does not say which shapes it returns, so what it allocates can't be "
            "known: register a fake implementation (torch.library.register_fake)"
        ) from error
