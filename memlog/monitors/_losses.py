"""A loss of any kind as a number, without waiting for a device and without keeping a graph alive.

Types are told apart by their class, never by ``hasattr`` on a value: a phiml tensor has every attribute.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

_NAMES = ("loss", "value", "fun")
"""Where a mapping has its loss."""
_DEPTH = 4
"""Containers within containers that are looked into."""


class Value(NamedTuple):
    """A loss that is known."""

    value: float | None
    """``None`` where it is no finite number; the mean of a loss with several elements."""
    text: str
    """As it is printed: six decimals."""


class Pending:
    """A loss on its way from a device to host memory.

    Args:
        host: The copy, which is valid once ``event`` has happened.
        event: Recorded on the device's stream behind the copy.
    """

    def __init__(self, host: Any, event: Any) -> None:
        self._host = host
        self._event = event

    def wait(self) -> Value:
        """Waits for the device: never on the trainer's thread."""
        self._event.synchronize()
        return known(self._host.item())


Reading: TypeAlias = Value | Pending | None


def known(number: Any) -> Value:
    """A number that the host holds; of a complex one, the real part."""
    value = float(number.real if isinstance(number, complex) else number)
    return Value(value if math.isfinite(value) else None, f"{value:.6f}")


def read(returned: Any) -> Reading:
    """The loss in what a loss function returned, or in what a trainer calls its loss.

    Args:
        returned: A number, an array or tensor, a phiml tensor; the first of a tuple or list of these;
            a mapping's ``"loss"``, ``"value"`` or ``"fun"``; a model output's ``loss``.

    Returns:
        ``None`` where there is no loss, or none yet, as when it is being traced.
    """
    value = _pick(returned)
    if value is None:
        return None
    if isinstance(value, (bool, int, float, complex)):
        return known(value)
    if _made_by(value, "phiml", "phi"):
        return _of_phiml(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value)
    return _of_array(value)


def _pick(value: Any) -> Any:
    for _ in range(_DEPTH):
        if isinstance(value, Mapping):
            value = next((value[name] for name in _NAMES if name in value), None)
        elif isinstance(value, (tuple, list)):
            # A named tuple or a model output that is one says by name which is its loss.
            value = _own(value) if _declares_loss(value) else value[0] if value else None
        elif _declares_loss(value):
            value = _own(value)
        else:
            return value
    return None


def _declares_loss(value: Any) -> bool:
    """Whether it is an object with a ``loss`` of its own: by its class, or in its ``__dict__``."""
    if _made_by(value, "phiml", "phi", "torch", "numpy", "jax", "jaxlib"):
        return False
    return hasattr(type(value), "loss") or "loss" in getattr(value, "__dict__", ())


def _own(value: Any) -> Any:
    return value.loss


def _made_by(value: Any, *packages: str) -> bool:
    return type(value).__module__.partition(".")[0] in packages


def _of_torch(torch: Any, tensor: Any) -> Reading:
    if tensor.numel() == 0 or tensor.is_meta or _is_traced(torch, tensor):
        return None
    local = getattr(
        type(tensor), "to_local", None
    )  # a DTensor: its full value would be a collective
    loss = (tensor if local is None else local(tensor)).detach()
    if loss.is_complex():
        loss = loss.real
    if loss.numel() > 1:
        loss = loss.double().mean() if loss.device.type == "cpu" else loss.float().mean()
    if loss.device.type == "cpu":
        return known(loss.item())
    return _on_device(torch, loss)


def _is_traced(torch: Any, tensor: Any) -> bool:
    """Whether there is no number in it: it stands for one in a graph, a transform or a fake world."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - no public name
        return True
    return type(tensor).__module__.startswith(("torch._subclasses", "torch.fx"))


def _on_device(torch: Any, loss: Any) -> Reading:
    """Starts a copy, which the device makes when it gets there."""
    if loss.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(loss.device):
            host = loss.to("cpu", non_blocking=True)  # into pinned memory: the host doesn't wait
            event = torch.cuda.Event(blocking=True)
            event.record()
        return Pending(host, event)
    host = loss.to("cpu", non_blocking=True)
    event = torch.Event(device=loss.device.type)
    event.record(torch.accelerator.current_stream(loss.device))
    return Pending(host, event)


def _of_phiml(value: Any) -> Reading:
    """One value an element of the batch; printed as phiml prints it where the host holds it."""
    tracing = sys.modules.get("phiml.backend.torch._torch_backend")
    if not value.available or (tracing is not None and getattr(tracing, "CURRENT_JIT_CALLS", None)):
        return None
    reading = read(value.native(value.shape))
    if isinstance(reading, Value) and value.shape.names:
        return reading._replace(text=f"{value:no-color}")
    return reading


def _of_array(value: Any) -> Reading:
    """Arrays and scalars of numpy's or jax's, and whatever else can be made a number."""
    if _made_by(value, "jax", "jaxlib"):
        return None if "Tracer" in type(value).__name__ else known(value.mean())
    if _made_by(value, "numpy"):
        return known(value.mean()) if value.size else None
    return known(value) if hasattr(type(value), "__float__") else None
