"""Monitors of training loops: batches and epochs, and evaluations of a loss that an optimiser calls."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from memlog._internal.current_session import Publisher
from memlog.console import (
    ProgressLine,
    announcement,
    batch_line,
    epoch_line,
    evaluation_lines,
    optimization_line,
)
from memlog.events import Batch, Epoch, Evaluation, Loss, now_us
from memlog.monitors import _publishing
from memlog.monitors._publishing import (
    DEFERRED_LOSSES,
    LossReading,
    LossValue,
    MemoryReader,
    body_of,
    read,
    require_function,
    update_wrapper,
)


class EpochMemoryMonitor:
    """Monitor for a training loop: call it at an epoch's start, after each batch, and at the epoch's end.

    Each call of `on_batch_end` counts as a step. memlog no longer counts optimizer steps. If there are
    several monitors, for example for training and validation, only the first monitor that ends a batch or an
    epoch counts. The other monitors only print lines. If the counting monitor is deleted, another monitor
    counts instead. The same happens if another monitor ends two epochs while the counting monitor is idle.

    Args:
        enabled: ``False``: calls do nothing.
        verbose_batches: Number of batches at the start of each epoch for which a line is printed.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.
    """

    def __init__(self, enabled: bool = True, verbose_batches: int = 5, device: Any = 0) -> None:
        self.enabled = enabled
        self.verbose_batches = verbose_batches
        if enabled:
            self._reader = MemoryReader(device)
            self._printed = 0
            self._step: int | None = None
            self._claimed: Publisher | None = None
            with _publishing.HEALTH.contained("beginning to monitor"):
                self._announce()

    def on_epoch_start(self) -> None:
        """Begin an epoch or a black-box optimisation."""
        if self.enabled:
            with _publishing.HEALTH.contained("beginning an epoch"):
                self._claim()
                self._printed = 0
                self._reader.epoch(0, None)  # excludes earlier peaks from this epoch

    def on_batch_start(self, batch_idx: int) -> None:
        """Do nothing: memory is read at the batch's end."""

    def on_batch_end(self, batch_idx: int, loss: Any = None) -> None:
        """End a batch. Call it after the optimizer's step.

        Args:
            batch_idx: The batch's number within the epoch, for the printed line.
            loss: A number, a tensor or any other loss that `watch_loss` accepts; ``None``: no loss. memlog
                does not wait for a loss on a device. memlog publishes the loss as soon as its value is known.
        """
        if not self.enabled or _publishing.silenced():
            return
        with _publishing.HEALTH.contained("ending a batch"):
            self._batch(batch_idx, loss)

    def on_epoch_end(self) -> None:
        """End an epoch: publish and print its peaks."""
        self._end("ending an epoch", epoch_line)

    def on_optimization_end(self) -> None:
        """End a black-box optimisation, as `on_epoch_end` ends an epoch, but print a different line."""
        self._end("ending an optimisation", optimization_line)

    def _announce(self) -> None:
        session = self._claim()
        if session is None or not session.announced:
            _publishing.print_notice(announcement, self.verbose_batches)

    def _claim(self) -> Publisher | None:
        """Return the running session. At the first call for a session, ask to count the session's steps."""
        session = _publishing.session()
        if session is not None and session is not self._claimed:
            session.claim_steps(only_first=True)
            self._claimed = session
        return session

    def _batch(self, index: int, loss: Any) -> None:
        session = self._claim()
        counts = session is not None and EPOCH_OWNER.counts(self, session)
        counted = session.count_step() if session is not None and counts else None
        self._step, event = counted if counted is not None else (None, None)
        shown = self._printed < self.verbose_batches
        self._printed += 1
        reading = read(loss)
        if event is None and not shown:
            return
        line = self._line_of(index) if shown else None
        step = event.step if event is not None else None

        def when_known(value: LossValue | None) -> None:
            if value is not None and step is not None and session is not None:
                session.publish(Loss(now_us(), step, value.value))
            if line is not None:
                text = None if value is None else value.text
                _publishing.print_notice(batch_line, index, line, text)

        DEFERRED_LOSSES.deliver(reading, when_known)

    def _line_of(self, index: int) -> Batch:
        point = self._reader.point("")
        return Batch(point.time_us, index, point.rss, None, None, point.devices)

    def _end(self, doing: str, line: Callable[[Epoch], str]) -> None:
        if self.enabled and not _publishing.silenced():
            with _publishing.HEALTH.contained(doing):
                event = self._publish_epoch()
                DEFERRED_LOSSES.deliver(None, lambda _: _publishing.print_notice(line, event))

    def _publish_epoch(self) -> Epoch:
        session = self._claim()
        if session is None:
            return self._reader.epoch(0, None)
        if not EPOCH_OWNER.counts(self, session):
            EPOCH_OWNER.other_epoch(self)
            return self._reader.epoch(0, None)
        event = self._reader.epoch(EPOCH_OWNER.next_epoch(), self._step)
        session.publish(event)
        return event


IDLE_EPOCHS = 2
"""Number of epochs that a second monitor must end before it replaces the counting monitor. Meanwhile, the
counting monitor must end no batch and no epoch. One epoch is not enough, because a validation between two
training epochs is an epoch, too."""


class EpochOwner:
    """Number of the session's next epoch, and the monitor that counts the session's steps and epochs."""

    def __init__(self) -> None:
        self._session: weakref.ref[Publisher] | None = None
        self._begin()

    def _begin(self) -> None:
        self._owner: weakref.ref[object] | None = None
        self._epochs: Iterator[int] = itertools.count()
        self._other: weakref.ref[object] | None = None
        self._epochs_of_other = 0

    def counts(self, monitor: object, session: Publisher) -> bool:
        """Return True if a batch or an epoch of ``monitor`` counts for the session.

        The first monitor that calls this method counts. If the counting monitor is deleted, the next caller
        counts. If the counting monitor is idle, a monitor that has ended `IDLE_EPOCHS` epochs counts.
        """
        if self._session is None or self._session() is not session:
            self._begin()  # epochs of another run begin at 0
            self._session = weakref.ref(session)
        owner = None if self._owner is None else self._owner()
        if owner is None or (self._is_other(monitor) and self._epochs_of_other >= IDLE_EPOCHS):
            self._owner, owner = weakref.ref(monitor), monitor
        if owner is monitor:
            self._other, self._epochs_of_other = None, 0
        return owner is monitor

    def other_epoch(self, monitor: object) -> None:
        """Record an ended epoch of a monitor whose epochs do not count for the session."""
        if not self._is_other(monitor):
            self._other, self._epochs_of_other = weakref.ref(monitor), 0
        self._epochs_of_other += 1

    def next_epoch(self) -> int:
        """Count the epoch that has just ended. Return its number in the session, from 0."""
        return next(self._epochs)

    def _is_other(self, monitor: object) -> bool:
        return self._other is not None and self._other() is monitor


EPOCH_OWNER = EpochOwner()
"""The only instance in a process, because a process has one session at a time."""


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@overload
def watch_loss(
    function: FunctionT, *, verbose_evaluations: int = 5, device: Any = 0
) -> FunctionT: ...
@overload
def watch_loss(
    function: None = None, *, verbose_evaluations: int = 5, device: Any = 0
) -> Callable[[FunctionT], FunctionT]: ...
def watch_loss(function: Any = None, *, verbose_evaluations: int = 5, device: Any = 0) -> Any:
    """Watch a loss function that a black-box optimiser calls (SciPy, PhiFlow, L-BFGS closures).

    The wrapper returns the same object that the function returns, and lets its exceptions pass unchanged.
    Errors inside memlog never reach the optimiser. memlog counts evaluations, not iterations: one L-BFGS step
    takes several evaluations. With PhiFlow, wrap the function that ``math.jit_compile`` returns. A wrapper
    inside ``math.jit_compile`` would be called only during tracing.

    Args:
        function: The function; ``None``: return a decorator.
        verbose_evaluations: Number of evaluations, from the first, for which a line is printed.
        device: Accelerator whose figures are read, by number or by torch's name, such as ``cuda:1``.

    Returns:
        A callable with the function's name and signature. The callable can be pickled if the function can. A
        worker process that unpickles it gets the function unwatched. memlog finds the loss in the function's
        result: the first item of a tuple or list; ``"loss"``, ``"value"`` or ``"fun"`` of a mapping; the
        attribute ``loss`` of an object. Of a loss with several elements, memlog takes the mean. If the
        function is an ``async def``, memlog looks for the loss in the awaited value.

    Raises:
        ConfigurationError: ``function`` can't be called.
    """
    if function is None:
        return functools.partial(watch_loss, verbose_evaluations=verbose_evaluations, device=device)
    require_function("watch_loss", function)
    watch = _LossWatch(verbose_evaluations, device)
    if inspect.iscoroutinefunction(body_of(function)):
        return _watched_async(function, watch)
    watched = _WatchedLoss(function, watch)
    return _bindable(watched, function) if _is_method(function) else watched


class _WatchedLoss:
    """Wrapper of a loss function. It is an object so that optimisers can pickle it for worker processes.

    The class has no ``__get__``: with ``__get__``, PhiFlow could not read the function's arguments.
    """

    def __init__(self, function: Callable[..., Any], watch: _LossWatch) -> None:
        update_wrapper(self, function)
        self._function = function
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return self._function(*args, **kwargs)
        try:
            returned = self._function(*args, **kwargs)
        except BaseException as error:
            self._watch.evaluated(None, type(error).__name__)
            raise
        self._watch.evaluated(returned, None)
        return returned

    def __reduce__(self) -> str | tuple[Callable[[Any], Any], tuple[Any]]:
        """Pickle by name if the name leads to this object; otherwise pickle the function, unwatched."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_itself, (self._function,))

    def __copy__(self) -> _WatchedLoss:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedLoss:
        """Return this object itself, because `copy.deepcopy` does not copy functions either."""
        return self


def _watched_async(function: Callable[..., Any], watch: _LossWatch) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = await function(*args, **kwargs)
        except BaseException as error:
            watch.evaluated(None, type(error).__name__)
            raise
        watch.evaluated(returned, None)
        return returned

    return update_wrapper(call, function)


def _is_method(function: Any) -> bool:
    """Return True if a function was defined in a class body."""
    return inspect.isfunction(function) and "." in function.__qualname__.rpartition("<locals>.")[2]


def _bindable(watched: _WatchedLoss, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return watched(*args, **kwargs)

    return call


def _itself(function: Any) -> Any:
    return function


class _LossWatch:
    """Counter and memory readings of one wrapper. Several threads can use the object at once."""

    def __init__(self, verbose: int, device: Any) -> None:
        self._reader = MemoryReader(device)
        self._verbose = verbose
        self._numbers = itertools.count()
        self._session: object = None

    def evaluated(self, returned: Any, error: str | None) -> None:
        """Record a call of the loss function: its result, or the type of its exception. Never raises.

        An exception of Ctrl-C or of a signal handler is ignored while memlog or ``on_alert`` runs. Some
        optimisers hang on an exception in their loss function.
        """
        if _publishing.silenced():
            return
        try:
            with _publishing.HEALTH.contained("watching a loss"):
                self._evaluated(returned, error)
        except (KeyboardInterrupt, Exception) as interruption:  # noqa: BLE001 - a signal handler's
            what, remedy = "Ctrl-C", ": press it again"
            if not isinstance(interruption, KeyboardInterrupt):
                what, remedy = f"a signal handler's {type(interruption).__name__}", ""
            _publishing.HEALTH.drop(
                "interrupts",
                f"{what} was ignored because it came while memlog read a loss, where it could make the "
                f"optimiser hang{remedy}",
            )

    def _evaluated(self, returned: Any, error: str | None) -> None:
        session = _publishing.session()
        if session is not self._session:
            self._session = session
            self._numbers = itertools.count()  # evaluations of another run begin at 0
        index = next(self._numbers)
        number = index if session is None else session.next_evaluation()
        tracker = innermost()
        iteration = None if tracker is None else tracker.evaluated()
        time_us, rss, devices = now_us(), self._reader.rss(), self._reader.devices()
        shown = index < self._verbose

        def when_known(value: LossValue | None) -> None:
            number_or_none = None if value is None else value.value
            event = Evaluation(time_us, number, number_or_none, rss, devices, error, iteration)
            text = None if value is None else value.text
            if tracker is not None:
                tracker.show(text, quietly=shown)
            if session is not None:
                session.publish(event)
            if shown:
                _publishing.print_notice(evaluation_lines, index, event, text)

        DEFERRED_LOSSES.deliver(_read(returned) if error is None else None, when_known)


def _read(returned: Any) -> LossReading:
    """Read a loss. If the reading fails, return ``None``, because the evaluation must still be recorded."""
    try:
        return read(returned)
    except Exception as error:  # noqa: BLE001 - the optimiser would hang or end on it
        _publishing.HEALTH.fault("reading a loss", error)
        return None


def _compiling() -> bool:
    """Return True if torch is compiling the call into a graph, to which memlog must add nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


_entered: list[track_iterations] = []


class track_iterations:  # noqa: N801 - a context manager, used like a function
    """Counter of the iterations of an optimiser that runs in a block. It prints a progress line.

    ::

        with memlog.track_iterations("L-BFGS-B") as iterations:
            scipy.optimize.minimize(memlog.watch_loss(loss), x0, callback=iterations)

    Every evaluation of a watched loss in the block records the number of its iteration. memlog counts the
    iterations of SciPy's ``minimize`` and PhiFlow's ``math.minimize``, and still calls the program's own
    callback. But if the program imported SciPy's ``minimize`` by name before the block, pass this object as
    the callback, as in the example. With other optimisers, call this object once per iteration. If several
    problems are solved together, the problem with the most iterations counts.

    Args:
        label: Beginning of the progress line.
        print_output: ``True``: print a progress line on standard error.

    Attributes:
        evaluations: Number of evaluations of watched losses in the block.
    """

    def __init__(self, label: str = "Optimization", print_output: bool = True) -> None:
        self.evaluations = 0
        self._label = label
        self._print = print_output
        self._line: ProgressLine | None = None
        self._loss: str | None = None
        self._lock = threading.Lock()
        self._over = 0
        self._running = 0
        self._counts: dict[object, int] = {}
        self._hooks = contextlib.ExitStack()

    @property
    def iterations(self) -> int:
        """Number of iterations that have ended."""
        return self._over + max(self._counts.values(), default=0)

    def __enter__(self) -> track_iterations:  # noqa: PYI034 - typing.Self came with Python 3.11
        """Begin to count."""
        with _publishing.HEALTH.contained("beginning to count iterations"):
            if not _publishing.silenced():
                _entered.append(self)
                self._line = ProgressLine(self._label) if self._print else None
                self._hooks.enter_context(_listening(self))
        return self

    def __exit__(self, *_: object) -> None:
        """End the count, also after an exception."""
        with _publishing.HEALTH.contained("ending to count iterations"):
            self._hooks.close()
            if self in _entered:
                _entered.remove(self)
                if self._line is not None:
                    self._line.close(self.evaluations, self.iterations, self._loss)

    def __call__(self, *_: Any) -> None:
        """Count an iteration that has ended. SciPy calls this as its ``callback``."""
        with self._lock:
            self._over += 1

    def evaluated(self) -> int:
        """Count a call of a watched loss, and return the number of the iteration that the call belongs to."""
        with self._lock:
            self.evaluations += 1
            return 0 if self.evaluations == 1 else self.iterations + 1

    def show(self, loss: str | None, *, quietly: bool) -> None:
        """Show the loss of an evaluation in the progress line; ``None``: unknown.

        With ``quietly``, only store the loss, because the evaluation prints its own line.
        """
        self._loss = loss
        if self._line is not None and not quietly:
            self._line.update(self.evaluations, self.iterations, loss)

    @contextlib.contextmanager
    def minimisation(self) -> Iterator[Callable[[], None]]:
        """Yield a function to call after each iteration of a minimisation. Minimisations can overlap."""
        key = object()
        with self._lock:
            self._counts[key] = 0
            self._running += 1
        try:
            yield functools.partial(self._advance, key)
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._over, self._counts = self.iterations, {}

    def _advance(self, key: object) -> None:
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1


def innermost() -> track_iterations | None:
    """Return the `track_iterations` of the innermost open block; ``None`` if no block is open."""
    return _entered[-1] if _entered else None


@contextlib.contextmanager
def _listening(tracker: track_iterations) -> Iterator[None]:
    """Make SciPy's ``minimize`` report its iterations to the tracker, if SciPy is installed."""
    if "scipy" not in sys.modules and importlib.util.find_spec("scipy") is None:
        yield
        return
    module: Any = importlib.import_module("scipy.optimize")
    original = module.minimize

    @functools.wraps(original)
    def minimize(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("callback")
        if given is tracker or len(args) >= _POSITION_OF_CALLBACK:
            return original(*args, **kwargs)
        with tracker.minimisation() as advance:
            return original(*args, **{**kwargs, "callback": _combined(given, advance)})

    module.minimize = minimize
    try:
        yield
    finally:
        if module.minimize is minimize:
            module.minimize = original


_POSITION_OF_CALLBACK = 11
"""Position of ``callback`` among the arguments of SciPy's ``minimize``, from 1."""


def _combined(given: Callable[..., Any] | None, advance: Callable[[], None]) -> Callable[..., Any]:
    if given is None:
        return lambda *_: advance()

    @functools.wraps(given)  # SciPy reads the signature to choose the callback's arguments
    def callback(*args: Any, **kwargs: Any) -> Any:
        advance()
        return given(*args, **kwargs)

    return callback
