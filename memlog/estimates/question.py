"""What `memlog.estimate` is asked (a step, its model, optimizer and batch), and the trace that answers it."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from memlog.errors import ConfigurationError
from memlog.estimates.fake_step import fake_mode, reasons, traced_step
from memlog.estimates.fakes import Fakes
from memlog.trace.records import RecordedTrace

Device: TypeAlias = Literal["cuda", "cpu"]
_ARGUMENTS = ("model", "optimizer", "batch", "length")


class Question:
    """What `estimate` was asked, and may be asked again with another batch or length."""

    def __init__(
        self,
        step: Callable[..., object],
        model: Any,
        optimizer: Any,
        batch: Any,
        length: int | None,
        *,
        device: Device,
        expandable: bool,
    ) -> None:
        self.step = step
        self.model = model
        self.optimizer = optimizer
        self.batch = batch
        self.length = length
        self.device = device
        self.expandable = expandable

    @property
    def size(self) -> int | None:
        """Number of samples in the batch; ``None``: unknown."""
        if isinstance(self.batch, int):
            return self.batch
        tensors = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        return tensors[0].shape[0] if tensors and tensors[0].ndim else None

    def known_size(self) -> int:
        """Return the number of samples.

        Raises:
            ConfigurationError: It is unknown.
        """
        if self.size is None:
            raise ConfigurationError(
                "the batch size is unknown: pass batch= to memlog.estimate, a number or tensors whose first "
                "dimension it is"
            )
        return self.size

    def with_batch(self, size: int) -> Question:
        """Return the question with another batch size."""
        if size < 1:
            raise ConfigurationError(f"batch={size!r}: write a whole number above 0")
        before = self.known_size()
        batch = size
        if not isinstance(self.batch, int):
            with fake_mode():
                batch = tree_map_only(
                    Tensor, lambda tensor: _resized(tensor, before, size), self.batch
                )
        return self._changed(batch=batch)

    def with_length(self, length: int) -> Question:
        """Return the question with another length."""
        if self.length is None:
            raise ConfigurationError("the length is unknown: pass length= to memlog.estimate")
        return self._changed(length=length)

    def _changed(self, *, batch: Any = None, length: int | None = None) -> Question:
        return Question(
            self.step,
            self.model,
            self.optimizer,
            self.batch if batch is None else batch,
            self.length if length is None else length,
            device=self.device,
            expandable=self.expandable,
        )

    def trace(self, mode: FakeTensorMode | None = None) -> RecordedTrace:
        """Trace the step, in the mode in which the model was made if its tensors are fake already."""
        mode = mode or fake_mode()
        fakes = Fakes(mode)
        given = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        known = self.model if isinstance(self.model, nn.Module) else None
        batch = fakes.in_all(self.batch)
        with fakes.replace(known, given), mode, reasons():
            model = known if known is not None or self.model is None else self.model()
            optimizer = given
            if optimizer is None and self.optimizer is not None:
                optimizer = self.optimizer(() if model is None else model.parameters())
            values = dict(zip(_ARGUMENTS, (model, optimizer, batch, self.length), strict=True))
            arguments = {name: values[name] for name in _names(self.step)}
            return traced_step(lambda: self.step(**arguments), model, optimizer, device=self.device)


def _resized(tensor: Tensor, before: int, size: int) -> Tensor:
    if not tensor.ndim or tensor.shape[0] != before:
        return tensor
    return tensor.new_empty((size, *tensor.shape[1:]))


def _names(step: Callable[..., object]) -> list[str]:
    """Return the arguments that a step function asks for.

    Raises:
        ConfigurationError: It asks for one that `estimate` does not have.
    """
    names = list(inspect.signature(step).parameters)
    unknown = [name for name in names if name not in _ARGUMENTS]
    if unknown:
        raise ConfigurationError(
            f"the step asks for {unknown[0]!r}: its arguments may be named {', '.join(_ARGUMENTS)}"
        )
    return names


def ask(
    step: Callable[..., object],
    *,
    model: Any = None,
    optimizer: Any = None,
    batch: Any = None,
    length: int | None = None,
    device: Device = "cuda",
    expandable_segments: bool = False,
) -> Question:
    """Check the arguments of `estimate`, and return what they ask."""
    if not callable(step):
        raise ConfigurationError(
            f"step={step!r:.100}: pass a function that makes one training step"
        )
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(f"device={device!r}: write 'cuda' or 'cpu'")
    return Question(
        step, model, optimizer, batch, length, device=device, expandable=expandable_segments
    )
