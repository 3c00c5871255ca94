"""Counter of an optimiser's iterations; one iteration takes several evaluations of the loss."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from memlog.console import ProgressLine
from memlog.monitors import _publishing

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
