"""Training iteration that a window should cover: its optimizers, its models, the call at its beginning.

The unit of time is a clock step: a step of the optimizer whose steps memlog counts (`memlog.autolog`). The
interval of an optimizer is the number of clock steps from one of its steps to the next. For example, an
optimizer that steps at every fifth clock step has interval 5. A window covers an iteration if two conditions
hold: the window has as many clock steps as the longest interval, and every optimizer that takes part has
stepped in the window.

A call without gradients may belong to a training step, or to an evaluation between two steps. The call counts
as part of a step if the last traced step began with a call of the same module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog.tracer.function_patch import COMPILE_WARNING_FILTER

LONGEST = 16
"""Maximum length of a window, in steps of the optimizer whose steps memlog counts. An optimizer that steps
more rarely does not step in most windows."""
_MOST = 4096
"""Maximum number of optimizers to track. A program may have one optimizer for each parameter. Beyond the
maximum, the optimizer whose last step is oldest is dropped."""

OptimizerRefs: TypeAlias = tuple[weakref.ref[Any], ...]


class OptimizerSchedule:
    """Record of how often every optimizer steps.

    Args:
        begins: Function to call with an optimizer whose step begins.
        ends: Function to call with an optimizer whose step has ended, if no other optimizer is stepping.

    Attributes:
        clock_steps: Number of steps so far of the optimizer whose steps memlog counts. The session's tracer
            increases the number.
    """

    def __init__(self, begins: Callable[[Any], object], ends: Callable[[Any], object]) -> None:
        self._begins = begins
        self._ends = ends
        self._parts: dict[int, _OptimizerSteps] = {}
        self._stepping: set[int] = set()
        self.clock_steps = 0

    def optimizer_begins(self, optimizer: Any) -> None:
        self._begins(optimizer)
        self._stepping.add(id(optimizer))
        part = self._parts.pop(id(optimizer), None)
        # Python may have given the `id` of a deleted optimizer to this one.
        if part is None or part.optimizer() is not optimizer:
            part = _OptimizerSteps(optimizer)
        elif self.clock_steps > part.last:
            part.interval = self.clock_steps - part.last
        part.last = self.clock_steps
        part.thread = threading.current_thread()
        self._parts[id(optimizer)] = part  # last, as the newest
        if len(self._parts) > _MOST:
            del self._parts[next(iter(self._parts))]
        if not part.in_window:
            part.in_window = True
            part.had_state = _has_state(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._stepping.discard(id(optimizer))
        if not self._stepping:
            self._ends(optimizer)

    @property
    def has_interval(self) -> bool:
        """True if the interval of an optimizer is known, because this optimizer has stepped twice."""
        # A list, because an optimizer of another thread can step during the loop.
        return any(part.interval is not None for part in list(self._parts.values()))

    def optimizers(self) -> list[Any]:
        """Return all optimizers except those of other threads.

        Inactive optimizers are included, because their state takes memory.
        """
        return [optimizer for _, optimizer in self.of_this_thread()]

    def has_joined(self, members: OptimizerRefs) -> bool:
        """Return whether some of ``members`` and some other optimizer take part in the current iteration."""
        there = {
            id(optimizer)
            for optimizer in (reference() for reference in members)
            if optimizer is not None
        }
        is_member = [id(part.optimizer()) in there for part in self.active()]
        return any(is_member) and not all(is_member)

    def begin_window(self) -> None:
        """Start a window. An optimizer step that is running counts as a step in the window.

        LBFGS, for example, calls the model within its step.
        """
        for identity, part in list(self._parts.items()):
            part.in_window = identity in self._stepping

    def active(self) -> Iterator[_OptimizerSteps]:
        """Yield the optimizers that take part in the current iteration."""
        for part, _ in self.of_this_thread():
            if self.clock_steps - part.last <= part.inactive_after:
                yield part

    def of_this_thread(self) -> Iterator[tuple[_OptimizerSteps, Any]]:
        """Yield the existing optimizers except those of other threads.

        An iteration belongs to one thread.
        """
        # A list, because an optimizer of another thread can step during the loop.
        for part in list(self._parts.values()):
            optimizer = part.optimizer()
            if optimizer is not None and not trained_elsewhere(part.thread):
                yield part, optimizer


class TracedIteration:
    """Optimizers' steps in a window. They tell which part of a training iteration the window covers."""

    def __init__(self, schedule: OptimizerSchedule) -> None:
        self._schedule = schedule
        self._began = 0

    def begin(self) -> None:
        """Begin to count steps. Call this when a window opens."""
        self._began = self._schedule.clock_steps
        self._schedule.begin_window()

    @property
    def steps(self) -> int:
        """Increase of `OptimizerSchedule.clock_steps` since the window began."""
        return self._schedule.clock_steps - self._began

    @property
    def is_done(self) -> bool:
        """True if the window covers an iteration. An unknown interval of an optimizer counts as 1."""
        # `active` first yields the optimizer whose last step is the oldest. So `any` usually ends at once,
        # also if there are very many optimizers.
        if any(not part.in_window for part in self._schedule.active()):
            return False
        return self.steps >= max(
            (part.interval or 1 for part in self._schedule.active()), default=1
        )

    @property
    def too_rare(self) -> bool:
        """True if an optimizer's interval exceeds `LONGEST`, or if `steps` has reached `LONGEST`."""
        rare = any((part.interval or 1) > LONGEST for part in self._schedule.active())
        return rare or self.steps >= LONGEST

    @property
    def state_is_new(self) -> bool:
        """True if an optimizer created its state within the window."""
        return any(
            not part.had_state and _has_state(optimizer) for part, optimizer in self._stepped()
        )

    def members(self) -> OptimizerRefs:
        """Return the optimizers that stepped in the window."""
        return tuple(part.optimizer for part, _ in self._stepped())

    def steps_all_of(self, models: Iterable[Any]) -> bool:
        """Return True if the optimizers that stepped have all trainable parameters of ``models``."""
        stepped = {
            id(parameter)
            for _, optimizer in self._stepped()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return all(
            id(parameter) in stepped
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        )

    def _stepped(self) -> list[tuple[_OptimizerSteps, Any]]:
        return [
            (part, optimizer)
            for part, optimizer in self._schedule.of_this_thread()
            if part.in_window
        ]


class _OptimizerSteps:
    """Steps of one optimizer, which is held weakly.

    Attributes:
        last: Value of `OptimizerSchedule.clock_steps` when the optimizer's last step began.
        interval: Increase of `OptimizerSchedule.clock_steps` between the optimizer's last two steps; ``None``
            before the optimizer's second step.
        in_window: True if the optimizer stepped in the window.
        had_state: True if the optimizer had state before its first step in the window.
        thread: Thread of the last step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.last = 0
        self.interval: int | None = None
        self.in_window = self.had_state = False
        self.thread: threading.Thread | None = None

    @property
    def inactive_after(self) -> int:
        """Number of clock steps. After a longer time without a step, the optimizer is inactive."""
        return LONGEST if self.interval is None else 2 * self.interval + 1


def _has_state(optimizer: Any) -> bool:
    return any(isinstance(kept, dict) and kept for kept in optimizer.state.values())


def trained_elsewhere(thread: threading.Thread | None) -> bool:
    """Return whether ``thread`` is another thread that may be training its models now.

    The process crashes if one thread reads ``parameter.grad`` while another thread resets the gradient.
    Return False for autograd's threads. Optimizer steps on these threads belong to the thread that calls
    ``backward``.
    """
    if thread is None or thread is threading.current_thread():
        return False
    # Python did not start autograd's threads, so `threading` represents them by this class.
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


class RootModules:
    """Root modules that a session remembers between traces, each with the thread that trains it.

    All modules except ``model`` are held weakly.

    Args:
        model: First root module, if the user has named one; else ``None``.
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._thread: threading.Thread | None = None
        self._others: list[tuple[weakref.ref[Any], threading.Thread | None]] = []
        self._optimizers: list[weakref.ref[Any]] = []

    def named(self) -> Any:
        """Return the model that the user has named; ``None`` if there is none or another thread trains it."""
        return None if trained_elsewhere(self._thread) else self._model

    def modules(self) -> list[Any]:
        """Return the known root modules, except those that another thread trains.

        Their order is always the same, because it decides the modules' names in a trace.
        """
        roots = [
            self.named(),
            *(root() for root, thread in self._others if not trained_elsewhere(thread)),
        ]
        return [module for module in roots if module is not None]

    def optimizers(self) -> list[Any]:
        """Return the optimizers that tell which root modules are trained. Some may never have stepped."""
        return [
            optimizer
            for optimizer in (reference() for reference in self._optimizers)
            if optimizer is not None
        ]

    def remember(
        self, roots: Sequence[Any], thread: threading.Thread | None, optimizers: Sequence[Any]
    ) -> None:
        """Replace the remembered root modules of ``thread`` by ``roots``, and remember ``optimizers``.

        Leave out modules without parameters, and modules that are parts of other modules.
        """
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        trained = [root for root in roots if next(root.parameters(), None) is not None]
        parts = {id(part) for root in trained for part in root.modules() if part is not root}
        if any(root is self._model for root in trained):
            self._thread = thread
        own_roots = {
            id(root): root for root in trained if root is not self._model and id(root) not in parts
        }
        self._others = [
            (root, other)
            for root, other in self._others
            if trained_elsewhere(other) and id(root()) not in own_roots
        ] + [(weakref.ref(root), thread) for root in own_roots.values()]

    def may_train(self, module: Any) -> bool:
        """Return whether a call of ``module`` may begin a training step.

        Return False if nothing can be trained, for example in a transform of the data. A module in evaluation
        mode may begin a step, because models with frozen statistics are trained in this mode.
        """
        import torch  # noqa: PLC0415 - loaded already: a module is called

        if not torch.is_grad_enabled():
            return False
        return any(
            parameter.requires_grad
            for root in (self.modules() or [module])
            for parameter in root.parameters()
        )


class FrozenStart:
    """Frozen module: a module that a step calls first, without gradients. The module is held weakly.

    Attributes:
        missed: True if the step called the frozen module before the window opened. The trace lacks this call.
    """

    def __init__(self) -> None:
        self.missed = False
        self._last_start: weakref.ref[Any] | None = None
        self._thread: int | None = None
        self._first_called: dict[int, weakref.ref[Any]] = {}
        self._matches = False

    def reset(self) -> None:
        """Forget the calls so far. Call this before the next step begins."""
        self._first_called = {}
        self._matches = False

    def is_step_start(self, module: Any) -> bool:
        """Return whether a window should open at this call of ``module``, a module that is not trained.

        Return True if the last traced step ran on this thread, and began with a call of ``module``. Other
        threads may call modules to prepare data.
        """
        thread = threading.get_ident()
        if thread in self._first_called:
            return False
        self._first_called[thread] = weakref.ref(module)
        if thread != self._thread:
            return False
        usual = self._last_start() if self._last_start is not None else None
        self._matches = usual is module
        return self._matches

    def window_opened(self) -> None:
        """Remember which module this thread called first in the step, and set `missed`.

        Call this when a window opens.
        """
        self._thread = threading.get_ident()
        self._last_start = self._first_called.get(self._thread)
        self.missed = self._last_start is not None and not self._matches
        self.reset()

    def forget(self) -> None:
        """Forget the module with which the last traced step began.

        Call this when a window is abandoned. The calls before that window were not part of a training step.
        """
        self._last_start = None


_STEADY = 3
"""Number of steps after which ``torch.compile`` has compiled the model. A hook that is installed earlier
causes a second compilation."""


class CallWaiter:
    """Global hook for module calls outside compiled code. The hook causes no compilation.

    ``called`` gets the module and the inputs of each module call. Errors that it raises are counted, and not
    passed on.
    """

    def __init__(self, called: Callable[[Any, Any], None], diagnostics: Diagnostics) -> None:
        self._called = called
        self._diagnostics = diagnostics
        self._lock = threading.RLock()  # reentrant: a signal handler may run on the holder's thread
        self._handle: Any = None
        self._paused = False
        self._compilations: Callable[[], int] = int
        self._compiled = 0

    @property
    def waiting(self) -> bool:
        """True if module calls are reported."""
        return self._handle is not None and not self._paused

    def start(self) -> None:
        """Install the hook. A second call does nothing."""
        with self._lock:
            if self._handle is None:
                self._install()

    def stop(self) -> None:
        """Remove the hook. A second call does nothing."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()
                COMPILE_WARNING_FILTER.remove(self)

    def stop_or_pause(self) -> None:
        """Remove the hook. If code was compiled since `start`, only pause the reports of module calls.

        Removing the hook would compile that code again.
        """
        if self._handle is not None and self._compilations() != self._compiled:
            self._paused = True
        else:
            self.stop()

    def _install(self) -> None:
        import torch  # noqa: PLC0415 - loaded already

        from memlog.torchside import internals  # noqa: PLC0415 - torch is loaded already

        compiling = torch.compiler.is_compiling

        def hook(module: Any, inputs: Any) -> None:
            if compiling() or self._paused:
                return
            try:
                self._called(module, inputs)
            except Exception as error:  # noqa: BLE001 - training goes on
                self._diagnostics.fault("noticing a module that is called", error)

        internals.skip_compiling(hook)
        self._paused, self._compilations = False, internals.compilations
        self._compiled = internals.compilations()
        COMPILE_WARNING_FILTER.add(self)
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)


def when_to_wait(roots: RootModules, steps: int) -> Literal["now", "later", "never"]:
    """Return when a hook for module calls can be installed without causing a compilation.

    - "now": ``torch.compile`` is not in use, or has compiled its code.
    - "later": ``torch.compile`` has yet to compile its code.
    - "never": Tracing would compile code again, or make it run uncompiled. This is so with older torch, if
      the compiled model is on the CPU, or if code outside the model is compiled.

    ``steps``: Number of the session's steps so far.
    """
    from memlog.torchside.internals import compiler_in_use  # noqa: PLC0415 - torch is loaded already

    if not compiler_in_use():
        return "now"
    from memlog.tracer.engines.dispatch_mode import leaves_code_compiled  # noqa: PLC0415 - loads parts of torch
    from memlog.tracer.window import are_compiled, device_of  # noqa: PLC0415 - likewise

    modules = roots.modules()
    if not leaves_code_compiled() and (
        not are_compiled(modules) or device_of(modules, None).type == "cpu"
    ):
        return "never"
    return "later" if steps < _STEADY else "now"
