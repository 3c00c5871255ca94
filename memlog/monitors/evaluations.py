"""Monitor of a loss function that an optimiser calls: every evaluation is an event."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from memlog.console import evaluation_lines
from memlog.events import Evaluation, now_us
from memlog.monitors import _publishing, iterations
from memlog.monitors._deferred_losses import DEFERRED_LOSSES
from memlog.monitors._functions import body_of, require_function, update_wrapper
from memlog.monitors._losses import LossReading, LossValue, read
from memlog.monitors._readings import MemoryReader

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
        tracker = iterations.innermost()
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
