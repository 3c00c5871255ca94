"""Arguments of `memlog.estimate` (a step, its model, optimizer and batch), and the trace made from them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlog.autolog.saved_state import saved_state
from memlog.errors import ConfigurationError
from memlog.estimates.cuda_kernels.reductions import A100, Gpu
from memlog.estimates.device_memory import TracedTraining
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.fake_step import only_new_objects, reasons, traced_step, traced_training
from memlog.estimates.fakes import Fakes, any_initial_values, one_of, refuse_several_processes
from memlog.estimates.places import Places, all_on_cpu
from memlog.estimates.plan import NO_CHANGES, StepChanges
from memlog.events import SavedState
from memlog.torchside.compiled_code import can_plan, planned_by_inductor
from memlog.torchside.fakes import tree_leaves, tree_map_only
from memlog.trace.records import RecordedTrace
from memlog.tracer.engines.simulated_step import SIMULATED
from memlog.tracer.window import are_compiled

DeviceType: TypeAlias = Literal["cuda", "cpu"]
_Of = TypeVar("_Of")
Refs: TypeAlias = list[weakref.ref[_Of]]
_ARGUMENTS = ("model", "optimizer", "batch", "length")


@dataclass(frozen=True, kw_only=True)
class Question:
    """Arguments of `estimate`, and methods that return the arguments with another batch or length.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    step: Callable[..., object]
    model: Any = None
    optimizer: Any = None
    batch: Any = None
    length: int | None = None
    device: DeviceType = "cuda"
    gpu: Gpu = A100
    expandable_segments: bool = False
    ranks: int | None = None
    changes: StepChanges = NO_CHANGES

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise ConfigurationError(
                f"step={self.step!r:.100}: pass a function that makes one training step"
            )
        if not _is_batch(self.batch):
            raise ConfigurationError(
                f"batch={self.batch!r:.100}: write a whole number above 0, or pass tensors"
            )
        if self.device not in ("cuda", "cpu"):
            raise ConfigurationError(f"device={self.device!r}: write 'cuda' or 'cpu'")

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
            ConfigurationError: The number is unknown.
        """
        if self.size is None:
            raise ConfigurationError(
                "the batch size is unknown: pass batch= to memlog.estimate, as a number or as tensors, whose "
                "first dimension is the batch size"
            )
        return self.size

    def with_batch(self, size: int) -> Question:
        if not _is_batch(size):
            raise ConfigurationError(f"batch={size!r:.100}: write a whole number above 0")
        before = self.known_size()
        batch = size
        if not isinstance(self.batch, int):
            # In this mode, a larger batch takes no memory.
            with FakeMode():
                batch = tree_map_only(
                    Tensor, lambda tensor: _resized(tensor, before, size), self.batch
                )
        return replace(self, batch=batch)

    def with_length(self, length: int) -> Question:
        if self.length is None:
            raise ConfigurationError("the length is unknown: pass length= to memlog.estimate")
        return replace(self, length=length)

    @only_new_objects()
    def trace(
        self, mode: FakeMode | None = None
    ) -> tuple[RecordedTrace | TracedTraining, SavedState | None, bool]:
        """Trace the step on fake tensors; for a CUDA device, also the first step.

        If the model was made with fake tensors, ``mode`` is their mode. Otherwise it is ``None``. The second
        result is the size of what a checkpoint saves; ``None``: the step has neither model nor optimizer. The
        third is True if there is an optimizer, which may never step.
        """
        if mode is None:
            mode = FakeMode(Places() if self.device == "cuda" else None)
            with one_of(self.ranks, mode):
                return self.trace(mode)
        fakes = Fakes(mode)
        # A model and optimizers that exist already get fake tensors. What a function makes below is fake from
        # the start.
        given = [value for value in _several(self.optimizer) if isinstance(value, Optimizer)]
        known = self.model if isinstance(self.model, nn.Module) else None
        batch = fakes.in_all(self.batch)
        if known is not None:
            refuse_several_processes(known, self.ranks)
        planned = planned_by_inductor(on_cuda=self.device == "cuda")
        with (
            fakes.replace(known, given),
            SIMULATED.knowing(stand_in=fakes.counted),
            planned,
            mode,
            reasons(),
        ):
            with all_on_cpu(mode.places), any_initial_values():
                model = _made("model", nn.Module, self.model)
                if model is not None:
                    refuse_several_processes(model, self.ranks)
                if model is not None and are_compiled([model]) and not can_plan():
                    raise ConfigurationError(
                        f"torch {torch.__version__} can't tell what compiled code allocates: install 2.13, "
                        "or pass the model without torch.compile"
                    )
                parameters = () if model is None else model.parameters()
                optimizer = _made("optimizer", Optimizer, self.optimizer, parameters)
                optimizers = _several(optimizer)
                self.changes.shard(model, optimizers)
            values = dict(zip(_ARGUMENTS, (model, optimizer, batch, self.length), strict=True))
            arguments = {name: values[name] for name in _names(self.step, values)}

            given_step = partial(self.step, **arguments)
            changed = self.changes.made(given_step, model, optimizers)
            with changed as (step, optimizers), _used() as used, _optimizers_made() as made:
                traced: RecordedTrace | TracedTraining
                if mode.places is not None:
                    traced = traced_training(step, model, optimizers, self.gpu, mode.places)
                else:
                    traced = traced_step(step, model, optimizers, measure=True)
            called, stepped = used
            if model is None and called:
                model = called[0]()
            optimizers = optimizers or [
                alive for reference in stepped if (alive := reference()) is not None
            ]
            to_save = _to_save(model, optimizers, mode.places, self.ranks or 1)
            return traced, to_save, bool(optimizers or made)


@contextmanager
def _used() -> Iterator[tuple[Refs[nn.Module], Refs[Optimizer]]]:
    """Yield lists of the first module that is called and of the optimizers that step inside the block."""
    # Weak references: the lists must not keep alive what the step frees.
    called: Refs[nn.Module] = []
    stepped: Refs[Optimizer] = []

    def note_call(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and not called:
            called.append(weakref.ref(module))

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is reference() for reference in stepped):
            stepped.append(weakref.ref(optimizer))

    hooks = (
        register_module_forward_pre_hook(note_call),
        register_optimizer_step_post_hook(note_step),
    )
    try:
        yield called, stepped
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _optimizers_made() -> Iterator[list[type]]:
    """Yield a list of the types of the optimizers that are made inside the block."""
    made: list[type] = []
    initialise = Optimizer.__init__

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        made.append(type(self))

    with patch.object(Optimizer, "__init__", noted):
        yield made


def _to_save(
    model: nn.Module | None, optimizers: Sequence[Optimizer], places: Places | None, ranks: int
) -> SavedState | None:
    if model is None and not optimizers:
        return None

    def is_on_host(tensor: Tensor) -> bool:
        return places is None or places.is_elsewhere(places.of_storage(tensor.untyped_storage()))

    return saved_state(model, optimizers, ranks=ranks, is_on_host=is_on_host)


def _resized(tensor: Tensor, before: int, size: int) -> Tensor:
    if not tensor.ndim or tensor.shape[0] != before:
        return tensor
    return tensor.new_empty((size, *tensor.shape[1:]))


def _several(optimizers: Any) -> Sequence[Any]:
    """Return optimizers as a sequence. ``optimizers``: One, a list or tuple of them, or ``None``."""
    if isinstance(optimizers, (list, tuple)):
        return optimizers
    return () if optimizers is None else (optimizers,)


def _made(name: str, kind: type, given: Any, *arguments: Any) -> Any:
    """Return the model or optimizers ``given``. If ``given`` is a function, return the function's result."""
    if given is None or isinstance(given, kind):
        return given
    made = given(*arguments) if callable(given) else given
    several = kind is Optimizer and made and isinstance(made, (list, tuple))
    if isinstance(made, kind) or (several and all(isinstance(part, kind) for part in made)):
        return made
    if several:
        raise ConfigurationError(
            "optimizer= is a list of which a part is no optimizer: pass optimizers that are already made, or "
            "a function that makes the list from the parameters"
        )
    shown = f"a function that returns {made!r:.100}" if callable(given) else f"{given!r:.100}"
    raise ConfigurationError(
        f"{name}= is {shown}: pass a torch.{kind.__module__.split('.')[1]}.{kind.__name__}, or a function "
        "that returns one"
    )


def _is_batch(batch: Any) -> bool:
    if isinstance(batch, (bool, int)):
        return batch is not True and batch > 0
    return batch is None or any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))


def _names(step: Callable[..., object], values: dict[str, Any]) -> list[str]:
    """Return the names of the step's parameters for which ``values`` has a value.

    Raises:
        ConfigurationError: A parameter has neither a default nor a value.
    """
    asked = {
        name: parameter.default is not parameter.empty
        for name, parameter in inspect.signature(step).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    for name, has_default in asked.items():
        if name not in values and not has_default:
            raise ConfigurationError(
                f"the step asks for {name!r}: its arguments may be named {', '.join(_ARGUMENTS)}"
            )
        if values.get(name) is None and not has_default:
            raise ConfigurationError(f"the step asks for {name!r}: pass {name}= to memlog.estimate")
    return [name for name in asked if values.get(name) is not None]
