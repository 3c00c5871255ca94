"""What monitors share: wrapped functions, readings of memory, their publishing, losses as numbers.

If no session runs, lines are printed and events are dropped. If a disabled session runs, nothing is published
or printed.

Types are recognised by their class, never by ``hasattr`` on a value: a phiml tensor has every attribute.
"""

from __future__ import annotations

import functools
import inspect
import math
import queue
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, NamedTuple, TypeAlias, TypeVar

from memlog._internal import current_session, processes, terminal
from memlog._internal.current_session import Publisher
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError
from memlog.events import DeviceReading, Epoch, Event, Recorded, now_us
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.process import HostProbe, PeakWindow
from memlog.torchside.loaded import is_without_value

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Function that creates the context manager of one call."""

_END = object()
"""Marker that stands for the end of an async generator."""


def within(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` wrapped so that each call runs inside a context manager from ``around``.

    A generator's context lasts from the first item until the generator is exhausted or closed.
    """
    body = body_of(function)
    if inspect.iscoroutinefunction(body):
        made = _awaiting(around, function)
    elif inspect.isgeneratorfunction(body):
        made = _generating(around, function)
    elif inspect.isasyncgenfunction(body):
        made = _generating_async(around, function)
    else:
        made = _calling(around, function)
    return update_wrapper(made, function)


def update_wrapper(wrapper: CallableT, function: Callable[..., Any]) -> CallableT:
    """Give a wrapper the function's name, signature and docstring, as `functools.update_wrapper` does.

    Attributes are copied from functions only. Attributes of an ``nn.Module`` would keep the module's
    parameters alive.
    """
    updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
    functools.update_wrapper(wrapper, function, updated=updated)
    return wrapper


def _calling(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return call


def _awaiting(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return await function(*args, **kwargs)

    return call


def _generating(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Any:
        with around():
            return (yield from function(*args, **kwargs))

    return generate


def _generating_async(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with around():
            async with aclosing(function(*args, **kwargs)) as source:
                # This loop does what ``yield from`` does, because async generators don't support it.
                item = await _next_or_end(anext(source))
                while item is not _END:
                    thrown = sent = None
                    try:
                        sent = yield item
                    except Exception as error:  # noqa: BLE001 - the wrapped generator handles it
                        thrown = error
                    step = source.asend(sent) if thrown is None else source.athrow(thrown)
                    item = await _next_or_end(step)

    return generate


async def _next_or_end(item: Awaitable[Any]) -> Any:
    try:
        return await item
    except StopAsyncIteration:
        return _END


def require_function(decorator: str, function: Any) -> None:
    """Check that an object can be called; ``decorator`` is the name in the message.

    Raises:
        ConfigurationError: The object can't be called.
    """
    if not callable(function):
        shown = repr(function)[:100]
        hint = f"; put @{decorator} below @classmethod" if isinstance(function, classmethod) else ""
        raise ConfigurationError(
            f"{decorator} watches functions, and {shown} is a {type(function).__name__}: "
            f"pass a function or another object that can be called{hint}"
        )


def body_of(function: Any) -> Any:
    """Return the function that runs when ``function`` is called, such as an object's ``__call__`` method."""
    if isinstance(function, functools.partial):
        return body_of(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__


class _MonitorDiagnostics(Diagnostics):
    """Counter of the monitors' errors.

    If a session runs, the errors are counted in the session's health; otherwise in this object.
    """

    def drop(self, reason: str, message: str, *, count: int = 1) -> None:
        running = session()
        if running is None:
            super().drop(reason, message, count=count)
        else:
            running.health.drop(reason, message, count=count)

    def fault(self, where: str, error: BaseException) -> None:
        running = session()
        if running is None:
            super().fault(where, error)
        else:
            running.health.fault(where, error)


HEALTH = _MonitorDiagnostics()
"""Counter of errors inside the monitors."""


def silenced() -> bool:
    """Return True if the current session is disabled. Monitors must then do nothing."""
    publisher = current_session.publisher()
    return publisher is not None and not publisher.enabled


def session() -> Publisher | None:
    """Return the session to publish to; ``None`` if no enabled session runs."""
    publisher = current_session.publisher()
    return publisher if publisher is not None and publisher.enabled else None


def publish(event: Event) -> None:
    """Publish an event to the running session, if there is one."""
    running = session()
    if running is not None:
        running.publish(event)


def print_notice(lines: Callable[..., str], *values: object) -> None:
    """Print the text that ``lines`` returns for ``values``, unless the text is empty. Never raises.

    ``lines`` is a function of `memlog.console`.
    """
    if not silenced():
        with HEALTH.contained("printing"):
            if text := lines(*values):
                terminal.out(text)


MAX_LABEL = 500
"""Maximum number of characters of a label. Further characters are cut off."""
MAX_POINTS = 10_000
"""Maximum number of points that a monitor keeps. After that, each new point replaces the oldest one. The
journal keeps all points."""


@functools.cache
def host() -> HostProbe:
    """Return the process's only host probe. The probe keeps files open, so all readers share it."""
    return HostProbe(HEALTH)


def device_index(device: Any) -> int:
    """Return a device's index: 0 for ``0``, ``"cuda:0"``, ``"cuda"`` or ``torch.device("cuda:0")``."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        _, _, index = device.partition(":")
        return int(index) if index.isdigit() else 0
    return int(getattr(device, "index", None) or 0)


class MemoryReader:
    """Reader of memory at points in time. Each reader measures peaks since its own previous reading.

    Readings contain only one accelerator: ``device``, given by number or by torch's name.
    """

    def __init__(self, device: Any = 0) -> None:
        self._index = device_index(device)
        self._accelerators = AcceleratorProbe(HEALTH)
        self._window = PeakWindow()

    def __reduce__(self) -> tuple[type[MemoryReader], tuple[int]]:
        """Give a copied or unpickled reader new probes, because probes belong to their process."""
        return MemoryReader, (self._index,)

    def rss(self) -> int | None:
        """Return this process's resident set in bytes; ``None`` if unknown."""
        return host().read().rss

    def devices(self) -> tuple[DeviceReading, ...]:
        """Return the reading of the reader's device; empty if the device is not in use."""
        return tuple(r for r in self._accelerators.read() if _index_of(r) == self._index)

    def point(self, label: Any) -> Recorded:
        return Recorded(now_us(), str(label)[:MAX_LABEL], self.rss(), self.devices())

    def epoch(self, epoch: int, step: int | None) -> Epoch:
        """Read the memory in use now and the peaks since the last call."""
        rss, mark, *_ = host().read()
        peak, source = self._window.advance(rss, mark)
        return Epoch(now_us(), epoch, step, rss, peak, source, self.devices())


def _index_of(reading: DeviceReading) -> int:
    found = re.search(r"\d+$", reading.name)
    return int(found.group()) if found else 0


_NAMES = ("loss", "value", "fun")
"""Keys under which a mapping can hold a loss. The first key that exists is used."""
_DEPTH = 4
"""Maximum depth of the search for a loss in nested objects. The outermost object has depth 1."""


class LossValue(NamedTuple):
    """A loss whose value is known."""

    value: float | None
    """The loss, or its mean if it has several elements; ``None`` if it is not finite."""
    text: str
    """Text for printed lines, with six decimals."""


class Pending:
    """A loss that is being copied from a device to host memory.

    ``host`` is the copy. It is valid after ``event``, which the device's stream records after the copy.
    """

    def __init__(self, host: Any, event: Any) -> None:
        self._host = host
        self._event = event

    def wait(self) -> LossValue:
        """Wait for the device and return the value. Never call it on the trainer's thread."""
        self._event.synchronize()
        return known(self._host.item())


LossReading: TypeAlias = LossValue | Pending | None


def known(number: Any) -> LossValue:
    """Return the loss value of a number. A complex number counts with its real part."""
    value = float(number.real if isinstance(number, complex) else number)
    return LossValue(value if math.isfinite(value) else None, f"{value:.6f}")


def read(returned: Any) -> LossReading:
    """Find the loss in the result of a loss function or in the loss that a trainer passes.

    A loss is a number, an array, a tensor or a phiml tensor. It can be the first item of a tuple or list, the
    item ``"loss"``, ``"value"`` or ``"fun"`` of a mapping, or the attribute ``loss`` of a model's output. The
    result is ``None`` if there is no loss, or if the loss has no value yet, as during tracing.
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
        elif _declares_loss(value):  # perhaps a named tuple
            value = value.loss
        elif isinstance(value, (tuple, list)):
            value = value[0] if value else None
        else:
            return value
    return None


def _declares_loss(value: Any) -> bool:
    """Return True if a value's class or its ``__dict__`` defines ``loss``."""
    if _made_by(value, "phiml", "phi", "torch", "numpy", "jax", "jaxlib"):
        return False
    return hasattr(type(value), "loss") or "loss" in getattr(value, "__dict__", ())


def _made_by(value: Any, *packages: str) -> bool:
    return type(value).__module__.partition(".")[0] in packages


def _of_torch(torch: Any, tensor: Any) -> LossReading:
    if tensor.numel() == 0 or tensor.is_meta or _is_traced(torch, tensor):
        return None
    # Only a DTensor has this method. Reading its full value would need communication between ranks.
    local = getattr(type(tensor), "to_local", None)
    loss = (tensor if local is None else local(tensor)).detach()
    if loss.is_complex():
        loss = loss.real
    if loss.numel() > 1:
        loss = loss.double().mean() if loss.device.type == "cpu" else loss.float().mean()
    if loss.device.type == "cpu":
        return known(loss.item())
    return _on_device(torch, loss)


def _is_traced(torch: Any, tensor: Any) -> bool:
    """Return True if a tensor holds no number because it belongs to a graph, a transform or a fake mode."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return is_without_value(torch, tensor)


def _on_device(torch: Any, loss: Any) -> LossReading:
    """Start a copy to the host. The device makes the copy after its earlier work."""
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


def _of_phiml(value: Any) -> LossReading:
    """Read a phiml tensor with one value per batch element.

    If the tensor is in host memory, the result also has phiml's text of the loss, for printed lines.
    """
    tracing = sys.modules.get("phiml.backend.torch._torch_backend")
    if not value.available or (tracing is not None and getattr(tracing, "CURRENT_JIT_CALLS", None)):
        return None
    reading = read(value.native(value.shape))
    if isinstance(reading, LossValue) and value.shape.names:
        return reading._replace(text=f"{value:no-color}")
    return reading


def _of_array(value: Any) -> LossReading:
    """Read an array or a scalar of numpy or jax, or any other value that ``float`` accepts."""
    if _made_by(value, "jax", "jaxlib"):
        return None if "Tracer" in type(value).__name__ else known(value.mean())
    if _made_by(value, "numpy"):
        return known(value.mean()) if value.size else None
    return known(value) if hasattr(type(value), "__float__") else None


MAX_DEFERRED = 10_000
"""Maximum number of losses that wait for a device; further losses are dropped."""
_POLL_S = 0.002
"""Seconds between two checks for waiting losses."""


class DeferredLosses:
    """Thread that waits for losses that a device still computes. It starts at the first of these losses.

    A loss whose value is known is delivered at once if no earlier loss waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._generation = processes.generation
        self._waiting: queue.SimpleQueue[tuple[LossReading, Callable[[LossValue | None], None]]]
        self._waiting = queue.SimpleQueue()
        self._left = 0
        self._thread: threading.Thread | None = None

    def deliver(self, reading: LossReading, then: Callable[[LossValue | None], None]) -> None:
        """Call ``then`` with a loss's value, or with ``None`` if ``reading`` is ``None`` (there is no loss).

        If a device still computes this loss or an earlier loss, a background thread calls ``then`` later.
        The calls are made in the order of the losses.
        """
        if processes.generation != self._generation:
            self._begin()
        if not isinstance(reading, Pending) and not self._left:
            then(reading)
            return
        with self._lock:
            if self._left >= MAX_DEFERRED:
                HEALTH.drop(
                    "losses_waiting",
                    f"more than {MAX_DEFERRED:,} losses wait for a device: the newest are not recorded",
                )
                return
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memlog-losses", daemon=True)
                self._thread.start()
                current_session.before_finish(self.settle)
        self._waiting.put((reading, then))

    def settle(self, seconds: float) -> None:
        """Wait until every loss is delivered, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        if processes.generation != self._generation:
            return  # the waiting losses belong to the parent process
        while self._left and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _run(self) -> None:
        while True:
            reading, then = self._waiting.get()
            with HEALTH.contained("reading a loss from a device"):
                then(reading.wait() if isinstance(reading, Pending) else reading)
            with self._lock:
                self._left -= 1


DEFERRED_LOSSES = DeferredLosses()
"""The only instance in a process: all monitors share its thread."""
processes.renew(DEFERRED_LOSSES, "_lock", threading.Lock)
