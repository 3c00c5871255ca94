"""Search for gradients that a program computes, or prepares to compute, and never uses.

Autograd adds to such a gradient in each backward pass, and nothing clears or uses it. A gradient counts as
unowned if all of this is true:

- No existing ``torch.optim.Optimizer`` has the gradient's parameter.
- In a few watched iterations, no operation outside a backward pass reads or writes the gradient, except
  operations that compute or clip a norm. This condition excludes training loops that update parameters
  themselves.
- Dozens of steps later, the gradient is still the same tensor. Per step, torch has
  not counted more in-place changes than in the watched iterations. So nothing has cleared the gradient.
- A few more watched iterations give the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import instance_dict, instances, is_kind, pass_seconds
from memlog._internal.terminal import MIB, format_bytes
from memlog.events import Event, Finding, now_us
from memlog.leaks.autograd_graphs import UnusedGraphs
from memlog.leaks.live_tensors import storage_of, tensor_storage
from memlog.leaks.owner_chain import OwnerSearch
from memlog.leaks.owner_text import describe
from memlog.leaks.process_objects import TimeBudget
from memlog.leaks.watched_storages import StorageMode, may_watch, plain_tensors
from memlog.torchside import internals
from memlog.torchside.tensors import TensorBase
from memlog.tracer.function_patch import remove_when_possible
from memlog.tracer.schedule.budget import AT_START

_FIRST = 8
"""Number of steps before the first look at all parameters."""
_FACTOR = 8
"""Factor by which the step number rises from one look to the next: steps 8, 64, 512 and so on."""
_SHARE = 0.005
"""Maximum fraction of the run's time for looking at all parameters. A look begins if it is expected to stay
below this fraction of the time so far, or of `AT_START`."""


class WastedGradients:
    """Search for unused gradients, on the training thread of a session that traces layers.

    No method raises.
    """

    def __init__(self, publish: Callable[[Event], object], diagnostics: Diagnostics) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._unowned: UnownedGradients | None = UnownedGradients(diagnostics)
        self._unused: UnusedGraphs | None = UnusedGraphs(diagnostics)
        self._begun = time.monotonic()
        self._spent = 0.0
        self._steps = 0
        self._next_look = _FIRST

    @property
    def watching(self) -> bool:
        """True while iterations are watched with a dispatch mode."""
        return self._unowned is not None and self._unowned.watching

    def after_step(self, step: int, *, busy: bool) -> None:
        """Continue the search after an optimizer step.

        If ``busy`` is true, this search does not begin to watch iterations, because the next step is watched
        by the tracer or by the search for the cause of a growth.
        """
        self._steps += 1
        with self._diagnostics.contained("looking for unused gradients"):
            self._look_for_unowned(step, busy=busy)
            self._look_for_unused(step)

    def finish(self, step: int | None) -> None:
        """Judge a last time, and remove all hooks and modes of the search from torch."""
        with self._diagnostics.contained("looking for unused gradients"):
            if self._unused is not None:
                if step is not None:
                    self._unused.judge(step)
                self._unused.stop()
                self._take(self._unused.finding)
            if self._unowned is not None:
                self._unowned.stop()

    def _look_for_unused(self, step: int) -> None:
        if self._unused is not None:
            self._unused.step_ended(step)
            if self._take(self._unused.finding):
                self._unused = None

    def _look_for_unowned(self, step: int, *, busy: bool) -> None:
        search = self._unowned
        if search is None or (busy and not search.watching):
            return
        if search.watching or search.pending:
            if search.watching or may_watch():
                began = time.thread_time()
                search.step_ended(step)
                self._spent += time.thread_time() - began
        elif self._steps >= self._next_look and may_watch() and self._is_earned():
            began = time.thread_time()
            search.look(step)
            self._spent += time.thread_time() - began
            self._next_look = _FACTOR * self._steps
        if self._take(search.finding):
            self._unowned = None

    def _is_earned(self) -> bool:
        """Return whether the run has earned another look. In a process of too many objects, none begins."""
        expected = pass_seconds()
        may_take = _SHARE * max(time.monotonic() - self._begun, AT_START)
        return expected <= _SECONDS and self._spent + expected <= may_take

    def _take(self, finding: Finding | None) -> bool:
        if finding is not None:
            self._publish(finding)
        return finding is not None


_WATCHED: Final = 3
"""Number of iterations that are watched without a pause. After a pause, this number of iterations is watched
again."""
_BETWEEN: Final = 24
"""Minimum number of steps in the pause between the two groups of watched iterations."""
_LEAST_BYTES: Final = MIB
_LEAST_SHARE: Final = 0.02
"""Fraction of the bytes of all parameters' gradients. If the unowned gradients take less than this fraction,
or less than `_LEAST_BYTES`, the search does not go on."""
_SECONDS: Final = 0.5
"""Maximum processor seconds that a pass over all objects may be expected to take, and of the search for
owners."""
_NAMED: Final = 8
"""Maximum number of parameters whose owners are searched for: those with the largest gradients."""
_MAX_TENSORS: Final = 20_000
"""Maximum number of values that are looked at in the arguments of one operation."""
_PASSIVE: Final = frozenset(
    ("detach", "alias", "view", "norm", "linalg_vector_norm", "_foreach_norm", "mul_", "_foreach_mul_")
)  # fmt: skip
"""Operations that do not count as use of a gradient. They compute a norm, clip a norm, or make a view. Any
other operation on a view of the gradient counts as use of the gradient."""


class _Gradient(NamedTuple):
    """A gradient at the end of a step.

    ``parameter`` is an identity, because a weak reference would make ``torch.utils.swap_tensors`` fail.
    """

    parameter: int
    storage: int
    version: int
    size: int


class UnownedGradients:
    """Search for gradients that no optimizer owns. Call `step_ended` on the training thread."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.finding: Finding | None = None
        self.watching = False
        self._gradients: dict[int, _Gradient] = {}
        self._all_bytes = 0
        self._begun_at = self._ended_at = 0
        self._per_step = 0.0
        self._mode: StorageMode | None = None

    @property
    def pending(self) -> bool:
        """True if gradients without an owner are still being checked."""
        return bool(self._gradients)

    def look(self, step: int) -> None:
        """Look at all parameters at the end of a step.

        If the gradients that no optimizer owns are large enough, begin to watch iterations.
        """
        self._gradients, self._all_bytes = _unowned()
        self._per_step = 0.0
        self._watch_if_it_matters(step)

    def step_ended(self, step: int) -> None:
        if self.watching and step - self._begun_at >= _WATCHED:
            self._end_watch(step)
        elif not self.watching and self._gradients and step - self._ended_at >= _BETWEEN:
            self._gradients = _still(self._gradients, self._per_step * (step - self._ended_at))
            self._watch_if_it_matters(step)

    def stop(self) -> None:
        """End the watch. A second call is harmless."""
        self.watching = False
        self._gradients = {}
        self._remove_mode()

    def operation(self, func: Any, kind: int, args: Any, out: Any, inside: Any) -> None:
        """Exclude gradients from the search if an operation outside a backward pass uses them."""
        del kind, out, inside
        if internals.backward_task() != internals.NO_TASK:
            return
        if internals.operation_name(func) in _PASSIVE:
            return
        for tensor in plain_tensors(args, _MAX_TENSORS):
            self._gradients.pop(storage_of(tensor), None)

    def before_change(self, values: Any) -> None:
        """Do nothing: a `StorageMode` never calls this method of an observer."""

    def leave(self) -> bool:
        return self._mode is None or self._mode.leave()

    def _watch_if_it_matters(self, step: int) -> None:
        if not self._matters():
            self._gradients = {}
            return
        self.watching, self._begun_at = True, step
        self._mode = StorageMode(self, self._diagnostics)
        self._mode.begin()

    def _end_watch(self, step: int) -> None:
        self.watching = False
        self._remove_mode()
        # The first group of watched iterations sets it.
        is_second = self._per_step > 0
        before = self._gradients
        # Any number of changes counts, because this is how the usual number is measured.
        self._gradients = _still(before, float("inf"))
        if not self._matters():
            self._gradients = {}
            return
        rises = [
            gradient.version - before[key].version for key, gradient in self._gradients.items()
        ]
        self._per_step = max(rises) / (step - self._begun_at)
        self._ended_at = step
        if is_second:
            self.finding = self._finding(step)
            self._gradients = {}

    def _remove_mode(self) -> None:
        if self._mode is not None:
            self._mode.stop_observing()
            remove_when_possible(self)

    def _matters(self) -> bool:
        size = sum(gradient.size for gradient in self._gradients.values())
        return size >= max(_LEAST_BYTES, _LEAST_SHARE * self._all_bytes)

    def _finding(self, step: int) -> Finding:
        largest = sorted(self._gradients.values(), key=lambda gradient: -gradient.size)
        size = sum(gradient.size for gradient in largest)
        wanted = {gradient.parameter for gradient in largest[:_NAMED]}
        parameters, _ = _parameters_and_optimizers()
        name, place = _name([parameter for parameter in parameters if id(parameter) in wanted])
        subject = f"Parameters of `{name}`{place}" if name else "Parameters"
        return Finding(
            time_us=now_us(),
            step=step,
            kind="unowned_gradients",
            title=f"{subject} get gradients that no optimizer uses or clears: they take {format_bytes(size)} "
            "and the time to compute them",
            where=f"`{name}`{place}" if name else None,
            since_step=None,
            rate=None,
            forecast=None,
            limit=None,
            evidence=(
                f"{len(largest)} parameters that require gradients are in no optimizer; until step {step}, "
                f"backward passes added to the same gradients for at least {_BETWEEN} steps",
                f"in {2 * _WATCHED} watched iterations, only backward passes used these gradients",
            ),
            confidence="high",
            remedy=_remedy(name),
        )


def _remedy(name: str) -> str:
    freeze = f"`{name}.requires_grad_(False)`" if name.isidentifier() else "`requires_grad_(False)`"
    return (
        f"If it is not to be trained, freeze it ({freeze}) or call it under `torch.no_grad()`; otherwise add "
        "its parameters to the optimizer."
    )


def _unowned() -> tuple[dict[int, _Gradient], int]:
    """Return the unowned gradients by their storage's identity. Also return the bytes of all gradients."""
    parameters, optimizers = _parameters_and_optimizers()
    owned = {id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)}
    gradients = [gradient for parameter in parameters if (gradient := _gradient_of(parameter))]
    size = sum(gradient.size for gradient in gradients)
    unowned = {
        gradient.storage: gradient for gradient in gradients if gradient.parameter not in owned
    }
    return unowned, size


def _parameters_and_optimizers() -> tuple[list[Any], list[Any]]:
    objects = instances(torch.nn.Parameter, torch.optim.Optimizer)
    return (
        [each for each in objects if type(each) is torch.nn.Parameter],
        [each for each in objects if is_kind(each, torch.optim.Optimizer)],
    )


def _parameters_of(optimizer: Any) -> Iterable[Any]:
    groups = (instance_dict(optimizer) or {}).get("param_groups")
    for group in groups if type(groups) is list else ():
        parameters = group.get("params") if type(group) is dict else None
        yield from parameters if type(parameters) is list else ()


def _gradient_of(parameter: Any) -> _Gradient | None:
    gradient = TensorBase.grad.__get__(parameter)
    if type(gradient) is not torch.Tensor or TensorBase.grad_fn.__get__(gradient) is not None:
        return None
    storage = tensor_storage(gradient)
    if storage is None:
        return None
    version = TensorBase._version.__get__(gradient)
    return _Gradient(id(parameter), storage._cdata, version, storage.nbytes())


def _still(gradients: dict[int, _Gradient], most: float) -> dict[int, _Gradient]:
    """Return the new states of the gradients that are still the same tensors, and have changed in place.

    Leave out a gradient if the number of in-place changes (torch's version) has risen by more than ``most``.
    """
    parameters, _ = _parameters_and_optimizers()
    known = {gradient.parameter for gradient in gradients.values()}
    same = {}
    for now in [_gradient_of(parameter) for parameter in parameters if id(parameter) in known]:
        before = None if now is None else gradients.get(now.storage)
        if now is None or before is None or before.parameter != now.parameter:
            continue
        # Without a change, no backward pass has added to the gradient.
        if 0 < now.version - before.version <= most:
            same[now.storage] = now
    return same


def _name(parameters: list[Any]) -> tuple[str, str]:
    """Return Python code for the object that owns all the parameters, and the place of the object's variable.

    The code is a text such as ``model.encoder``. The place is a text such as "in `main()`", with a space in
    front. A text is empty if unknown.
    """
    budget = TimeBudget(_SECONDS)
    with budget.running():
        chains = OwnerSearch(budget, [parameters]).chains(parameters)
        owners = [describe(chain, frozenset()) for chain in chains if chain is not None]
        texts = [f"{owner.expression}{owner.contents}" for owner in owners]
    if not texts or not all(texts):
        return "", ""
    parts = [text.split(".")[:-1] or [text] for text in texts]  # without the parameter's own name
    common = [
        names[0]
        for names in takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    ]
    return ".".join(common), f" {owners[0].place}" if common and owners[0].place else ""
