"""Loss functions that somebody else calls: every evaluation is an event."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from memlog.console import EvaluationNotice
from memlog.events import Evaluation, now_us
from memlog.monitors import _publishing, iterations
from memlog.monitors._deferred_losses import LATE
from memlog.monitors._functions import body_of, require_function
from memlog.monitors._losses import Reading, Value, read
from memlog.monitors._readings import Meter

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
    """Watches a loss function that a black-box optimiser calls (SciPy, PhiFlow, L-BFGS closures).

    It hands back what the function returned, the same object, and re-raises unchanged what it raised; an
    error of memlog's own reaches nobody. Evaluations are counted, which are no iterations: an L-BFGS step
    takes several. With PhiFlow wrap it outermost, around ``math.jit_compile``: inside it would be called
    only while tracing.

    Args:
        function: The function; ``None``: returns a decorator.
        verbose_evaluations: For how many evaluations lines are printed.
        device: Whose accelerator figures.

    Returns:
        A callable with the function's name and signature, which can be pickled where the function can (a
        worker process that gets it so does not watch it). What counts as the loss in its result: the
        first of a tuple or list; a mapping's ``"loss"``, ``"value"`` or ``"fun"``; an object's ``loss``;
        the mean of several elements. Of an ``async def`` the loss is what it returns in the end.

    Raises:
        ConfigurationError: what it is to watch is no function.
    """
    if function is None:
        return functools.partial(watch_loss, verbose_evaluations=verbose_evaluations, device=device)
    require_function("watch_loss", function)
    watch = _Watch(verbose_evaluations, device)
    if inspect.iscoroutinefunction(body_of(function)):
        return _watched_async(function, watch)
    watched = _WatchedLoss(function, watch)
    return _bindable(watched, function) if _is_method(function) else watched


class _WatchedLoss:
    """The wrapper: an object, since optimisers send loss functions to their worker processes.

    It has no ``__get__``: PhiFlow could not find out its arguments then.
    """

    def __init__(self, function: Callable[..., Any], watch: _Watch) -> None:
        # Only a function's own attributes are copied: a module's would keep its parameters alive here.
        updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
        functools.update_wrapper(self, function, updated=updated)
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
        """Pickled by its name where that leads here; else the function alone is sent, unwatched."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_itself, (self._function,))

    def __copy__(self) -> _WatchedLoss:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedLoss:
        """Like a function, it is its own copy."""
        return self


def _watched_async(function: Callable[..., Any], watch: _Watch) -> Callable[..., Any]:
    updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()

    @functools.wraps(function, updated=updated)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = await function(*args, **kwargs)
        except BaseException as error:
            watch.evaluated(None, type(error).__name__)
            raise
        watch.evaluated(returned, None)
        return returned

    return call


def _is_method(function: Any) -> bool:
    """Whether it was written in a class's body."""
    return inspect.isfunction(function) and "." in function.__qualname__.rpartition("<locals>.")[2]


def _bindable(watched: _WatchedLoss, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return watched(*args, **kwargs)

    return call


def _itself(function: Any) -> Any:
    return function


class _Watch:
    """One wrapper's counter and windows; safe under threads."""

    def __init__(self, verbose: int, device: Any) -> None:
        self._meter = Meter(device)
        self._verbose = verbose
        self._numbers = itertools.count()
        self._session: object = None

    def evaluated(self, returned: Any, error: str | None) -> None:
        """A call is over. Never raises.

        Ctrl-C, or what a signal handler raises, while memlog or an ``on_alert`` is at work is not let
        through either: some optimisers hang for ever on an exception in their loss.
        """
        if _publishing.silenced():
            return
        try:
            with _publishing.HEALTH.contained("watching a loss"):
                self._evaluated(returned, error)
        except (KeyboardInterrupt, Exception) as interruption:  # noqa: BLE001 - a handler's: others are contained
            what, remedy = "Ctrl-C", ": press it again"
            if not isinstance(interruption, KeyboardInterrupt):
                what, remedy = f"a signal handler's {type(interruption).__name__}", ""
            _publishing.HEALTH.drop(
                "interrupts",
                f"{what} came while memlog looked at a loss, where it could leave the optimiser "
                f"hanging{remedy}",
            )

    def _evaluated(self, returned: Any, error: str | None) -> None:
        session = _publishing.session()
        if session is not self._session:
            self._session = session
            self._numbers = itertools.count()  # another run begins at 0
        index = next(self._numbers)
        number = index if session is None else session.next_evaluation()
        tracker = iterations.innermost()
        iteration = None if tracker is None else tracker.evaluated()
        time_us, rss, devices = now_us(), self._meter.rss(), self._meter.devices()
        shown = index < self._verbose

        def when_known(value: Value | None) -> None:
            number_or_none = None if value is None else value.value
            event = Evaluation(time_us, number, number_or_none, rss, devices, error, iteration)
            text = None if value is None else value.text
            if tracker is not None:
                tracker.show(text, quietly=shown)
            if session is not None:
                session.publish(event)
            if shown:
                _publishing.tell(EvaluationNotice(index, event, text))

        LATE.deliver(_read(returned) if error is None else None, when_known)


def _read(returned: Any) -> Reading:
    """A loss that can't be understood is an evaluation all the same."""
    try:
        return read(returned)
    except Exception as error:  # noqa: BLE001 - the optimiser would hang or end on it
        _publishing.HEALTH.fault("reading a loss", error)
        return None


def _compiling() -> bool:
    """Whether torch is making a graph of the call, in which memlog must leave nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())
