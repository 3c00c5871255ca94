"""A session's open window, and the limits beyond which a window is abandoned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from memlog._internal.diagnostics import Diagnostics

_MOST_CALLS: Final = 256
"""Maximum number of calls of the module whose call opened the window. Beyond the maximum, the window is
abandoned, because the step is too long or has no end."""
MOST_EVENTS = 1_000_000
"""Maximum number of events in a window. Beyond the maximum, the window is abandoned."""
_MOST_STEPS: Final = 30.0
"""Factor. A window is abandoned after one second plus this factor times the usual duration of a step."""
LIMITS: Final = (
    f"{_MOST_CALLS} calls of the model, {MOST_EVENTS:,} events or {_MOST_STEPS:g} usual steps"
)
ATTEMPT_FAILED: Final = "an allocation failed in it, and the program went on"


class OpenWindow:
    """Window that opens when this thread calls ``module`` with ``inputs``.

    ``model``: Model that the user has named, if any. ``roots``: Known root modules. If empty, the outermost
    module around ``module`` is the first root module. ``known``: Optimizers that tell, beside ``optimizers``,
    which networks are trained. ``usual_step``: Usual duration of a step without
    tracing, in seconds; ``None`` if unknown. ``most_seconds``: Seconds that memlog's own code may take;
    ``None``: no limit.

    Attributes:
        searching: Seconds of the search for the outermost module.
        thread: Traced thread. This thread opened the window.
        opened: Value of `time.perf_counter` when the window opened.
        allocation_failed: True if an allocation on a device failed in the window.
    """

    def __init__(
        self,
        module: Any,
        inputs: Any,
        *,
        model: Any,
        roots: Sequence[Any],
        optimizers: Sequence[Any],
        known: Sequence[Any],
        diagnostics: Diagnostics,
        usual_step: float | None,
        most_seconds: float | None,
    ) -> None:
        # Imported here: it loads parts of torch that most users of sessions never need.
        from memlog.tracer.attribution.module_names import ModuleParents  # noqa: PLC0415
        from memlog.tracer.window import TraceWindow  # noqa: PLC0415

        began = time.perf_counter()
        others = roots or [ModuleParents().outermost(module, optimizers)]
        self.searching = time.perf_counter() - began
        self.window = TraceWindow(
            model,
            others=others,
            optimizers=optimizers,
            known=known,
            diagnostics=diagnostics,
            types=True,
            most_events=MOST_EVENTS,
            most_seconds=most_seconds,
            read_users_history=False,
        )
        choice, device = self.window.choice, self.window.torch_device
        if choice.engine == "sampler" and device.type in ("cuda", "xpu"):
            diagnostics.say_once(
                "traced_by_statistics",
                "traced steps show neither categories nor what a layer allocated, and their peaks are lower "
                f"bounds: {choice.why}",
            )
        self.window.start()
        self.window.module_begins(module, inputs)
        self.window.took(time.perf_counter() - began)
        self.thread = threading.current_thread()
        self.opened = time.perf_counter()
        self.allocation_failed = False
        self._module, self._calls = id(module), 0
        self._deadline = self.opened + (
            1.0 + _MOST_STEPS * usual_step if usual_step else float("inf")
        )

    def exceeds_limits(self, module: Any) -> bool:
        """Count a module call, and return whether the window exceeds a limit."""
        self._calls += id(module) == self._module
        late = time.perf_counter() > self._deadline
        return self._calls > _MOST_CALLS or self.window.overflowed or late


class WindowSlot:
    """Holder of a session's open window. A session has at most one open window.

    Hooks open and close the window on any thread.

    Attributes:
        window: The open window; ``None`` if none is open.
        ended: True if no further window can open.
    """

    def __init__(self) -> None:
        self.window: OpenWindow | None = None
        self.ended = False
        # Reentrant: a signal handler may run on the thread that holds the lock.
        self._lock = threading.RLock()
        self._opening = False

    def open(self, make: Callable[[], OpenWindow | None], failed: Callable[[], object]) -> None:
        """Open a window, unless one is open or another thread is opening one.

        Args:
            make: Function that opens a window and returns it. It returns ``None`` if the window could not
                open.
            failed: Function that is called if the window could not open.
        """
        with self._lock:
            if self._opening or self.ended or self.window is not None:
                return
            self._opening = True
        try:
            self.window = make()
        finally:
            self._opening = False
            if self.window is None:
                failed()

    def if_free(self, act: Callable[[], object]) -> None:
        """Call ``act`` if no window is open and none is being opened."""
        with self._lock:
            if self.window is None and not self._opening:
                act()

    def take(self, *, any_thread: bool) -> OpenWindow | None:
        """Remove the open window and return it, so that only the caller closes it.

        Return ``None`` if no window is open. If ``any_thread`` is false, also return ``None`` if another
        thread opened the window.
        """
        with self._lock:
            opened = self.window
            if opened is None or not (any_thread or opened.thread is threading.current_thread()):
                return None
            self.window = None
        return opened

    def end(self) -> None:
        with self._lock:
            self.ended = True
