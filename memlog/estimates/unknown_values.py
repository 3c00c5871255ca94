"""Values of fake tensors. A program may print them and calculate with them, but not branch on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from memlog.errors import ConfigurationError
from memlog.estimates.data_loaders import real_indices
from memlog.estimates.lbfgs import lbfgs_without_values
from memlog.estimates.packed_sequences import packed_sequences
from memlog.estimates.several_processes import part_of

_CALCULATES = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ "
    "__abs__ __round__"
)
_LATE = 1000.0
"""Value that an optimizer reads from each fake tensor, such as the step counter. After 1,000 steps, the
behaviour of optimizers no longer changes."""
_DECIDES = "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __index__"

_READING: Final = frozenset((Tensor.item, Tensor.__format__, Tensor.numpy, Tensor.__array__))


class ValueUsedError(Exception):
    """Error: the program branches on a tensor's value, which an estimate does not compute."""


class ArrayMadeError(Exception):
    """Error: the program converts a tensor to a NumPy array, whose values an estimate does not compute."""


class UnknownNumber(float):
    """Number that stands for the value of a fake tensor (``loss.item()``).

    A calculation with it gives another unknown number. Comparing it, or converting it to `int` or `bool`,
    raises `ValueUsedError`, because the program would then branch on the value.
    """

    __hash__ = float.__hash__


def _calculating(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def calculate(self: UnknownNumber, *others: Any) -> Any:
        result = method(self, *others)
        return UnknownNumber(result) if isinstance(result, (int, float)) else result

    return calculate


def _deciding(*_: Any) -> Any:
    raise ValueUsedError


for _name in _CALCULATES.split():
    setattr(UnknownNumber, _name, _calculating(_name))
for _name in _DECIDES.split():
    setattr(UnknownNumber, _name, _deciding)


@contextmanager
def unknown_values() -> Iterator[None]:
    """Let programs read the values of fake tensors inside the block.

    Torch's optimizers may also branch on these values. The branches do not change the sizes of tensors.
    """
    mode = _Reading()
    hooks = (
        register_optimizer_step_pre_hook(lambda optimizer, *_: mode.optimizer(optimizer)),
        register_optimizer_step_post_hook(lambda *_: mode.optimizer(None)),
    )
    try:
        with mode, _scalers(), real_indices(), lbfgs_without_values(), packed_sequences():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _scalers() -> Iterator[None]:
    """Let gradient scalers step their optimizers, as they do if no gradient is infinite.

    Afterwards, the scalers have the state that they had before.
    """
    before = list[tuple[GradScaler, dict[str, Any]]]()
    scale = GradScaler.scale

    def scaled(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled() and not any(scaler is self for scaler, _ in before):
            before.append((self, dict(vars(self))))
            states = self._per_optimizer_states.copy()
            vars(self).update(_scale=None, _growth_tracker=None, _per_optimizer_states=states)
        return scale(self, outputs)

    def step(_: GradScaler, optimizer: Optimizer, __: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    try:
        with (
            patch.object(GradScaler, "scale", scaled),
            patch.object(GradScaler, "_maybe_opt_step", step),
        ):
            yield
    finally:
        for scaler, state in before:
            vars(scaler).update(state)


class _Reading(TorchFunctionMode):
    """Mode that replaces torch's functions that read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self._known = False

    def optimizer(self, stepping: Optimizer | None) -> None:
        """Note the optimizer whose step begins. If ``stepping`` is ``None``, note that the step has ended.

        Raises:
            ConfigurationError: The optimizer has real parameters: `memlog.estimate` did not get it.
        """
        self._known = stepping is not None
        groups = () if stepping is None else stepping.param_groups
        if not all(
            isinstance(part_of(one), FakeTensor) for group in groups for one in group["params"]
        ):
            raise ConfigurationError(
                f"the step uses an optimizer ({type(stepping).__name__}) that memlog.estimate did not get: "
                "pass optimizer="
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READING:
            return func(*args, **(kwargs or {}))
        part: Any = part_of(args[0])
        fake = isinstance(part, FakeTensor)
        if func is Tensor.item and fake and part.constant is None:
            return _LATE if self._known else UnknownNumber(1.0)
        if func is Tensor.__format__:
            return "?"
        if fake and func is not Tensor.item:
            raise ArrayMadeError
        return func(*args, **(kwargs or {}))
