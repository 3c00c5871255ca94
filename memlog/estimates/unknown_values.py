"""Values of fake tensors: a program may print them and calculate with them, but not decide by them."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from memlog.errors import ConfigurationError

_CALCULATES = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ "
    "__abs__"
)
_DECIDES = "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __round__"


class UnknownNumber(float):
    """Number that stands for the value of a fake tensor (``loss.item()``).

    Calculating with it gives another one. To compare it raises `ConfigurationError`, because what the program
    does next would depend on it.
    """

    __hash__ = float.__hash__


def _calculating(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def calculate(self: UnknownNumber, *others: Any) -> Any:
        result = method(self, *others)
        return UnknownNumber(result) if isinstance(result, float) else result

    return calculate


def _deciding(*_: Any) -> Any:
    raise ConfigurationError(
        "the step uses a tensor's value to decide, but an estimate computes none: remove that use"
    )


for _name in _CALCULATES.split():
    setattr(UnknownNumber, _name, _calculating(_name))
for _name in _DECIDES.split():
    setattr(UnknownNumber, _name, _deciding)


@contextmanager
def unknown_values() -> Iterator[None]:
    """Let programs read the values of fake tensors of fractions inside the block.

    Torch's optimizers may also decide by them: what they compute changes no size.
    """
    mode = _Reading()
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: mode.optimizer(stepping=True)),
        register_optimizer_step_post_hook(lambda *_: mode.optimizer(stepping=False)),
    )
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Reading(TorchFunctionMode):
    """Answers instead of fake tensors that are asked for their value."""

    def __init__(self) -> None:
        super().__init__()
        self._known = False

    def optimizer(self, *, stepping: bool) -> None:
        """Note that an optimizer's step begins or ends."""
        self._known = stepping

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.item and args[0].is_floating_point():
            return 1.0 if self._known else UnknownNumber(1.0)
        if func is Tensor.__format__:
            return "?"
        return func(*args, **(kwargs or {}))
