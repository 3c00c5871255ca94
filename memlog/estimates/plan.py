"""Plan: the cheapest changes with which a training step fits into a device's memory.

Changes are not added up: each combination that is tried is an estimate of the step with all its changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from memlog.errors import ConfigurationError
from memlog.estimates.fakes import is_distributed
from memlog.trace.predict import advise
from memlog.trace.predict.fitting import (
    Choices,
    FittingPlan,
    PlannedChanges,
    PlanSearch,
    plan_code,
    plan_steps,
)
from memlog.trace.predict.lifetimes import TracedStep

if TYPE_CHECKING:
    from memlog.estimates.estimate import Estimate


_SEVERAL: Final = "With several ranks (--ranks 8, ranks=8), a plan also shards the model."
ADAFACTOR: Final = "torch.optim.Adafactor()"


def refuse_plan(device: str) -> None:
    """Raise if there is no plan for such an estimate.

    Raises:
        ConfigurationError: The estimate is for the CPU.
    """
    if device == "cpu":
        raise ConfigurationError("a plan is for a CUDA device: leave out --cpu (device='cpu')")


def plan(estimated: Callable[[StepChanges], Estimate], memory: int) -> FittingPlan:
    """Return the cheapest changes with which a step fits into ``memory`` bytes.

    ``estimated`` returns the estimate of the step with changes. If its batch is known, ``parts`` divides it.
    """
    base = estimated(NO_CHANGES)

    @functools.cache
    def ask(changes: StepChanges) -> Estimate | None:
        if changes == NO_CHANGES:
            return base
        try:
            return estimated(changes)
        except Exception:  # noqa: BLE001 - whatever a changed step raises: its program can't be changed so
            return None

    batch, ranks = base.batch or 1, base.ranks or 1
    traced = TracedStep(base.recording)
    # An `Estimate` of several ranks has no hints, because their figures do not hold there.
    modules = next((hint.modules for hint in advise(base.recording).hints if hint.modules), ())
    others = {
        "one_by_one": (False, True),
        "autocast": (False, True),
        # The ranks of a pipeline have other parts of the model.
        "sharded": (None, *([_repeated(traced)] if ranks > 1 and not base.peak_by_rank else [])),
        "on_host": (False, True),
        "parameters_on_host": (False, True),
        "optimizer": ("", ADAFACTOR),
    }
    parts = [count for count in range(1, batch + 1) if batch % count == 0]
    choices = Choices(NO_CHANGES, parts, modules, others)
    chosen, fits = PlanSearch(ask, choices, memory).cheapest()
    last = ask(chosen) or base
    # Each part of the batch gathers the parameters in the forward and in the backward pass, and scatters the
    # gradients.
    sent = 3 * chosen.parts * sum(map(sum, traced.parameters().values())) * (ranks - 1) // ranks
    as_it_is = "as it is" if base.batch is None else f"a batch of {base.batch:,}"
    return FittingPlan(
        **{name: getattr(chosen, name) for name in PlannedChanges.__struct_fields__},
        memory=memory,
        fits=fits,
        steps=tuple(plan_steps(ask, chosen, memory, batch, as_it_is, ranks)),
        operations=_more_operations(estimated, chosen),
        without=last.without,
        code=plan_code(chosen, ranks=ranks) if fits else "",
        remarks=(_SEVERAL,) if not fits and ranks == 1 else (),
        ranks=ranks,
        moved=sent if chosen.sharded is not None else 0,
        host=last.on_host if chosen.on_host or chosen.parameters_on_host else 0,
    )


def _repeated(traced: TracedStep) -> tuple[str, ...]:
    """Return the paths of sibling modules of one class that have most parameters; empty if there are none."""
    parameters = traced.parameters()
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for layer in sorted({call.layer for call in traced.calls} - {1}):
        path = traced.paths[layer]
        own = sum(sum(parameters.get(inner, ())) for inner in traced.subtree(layer))
        if own and not path.startswith("("):
            groups.setdefault((path.rpartition(".")[0], traced.kind(layer)), {})[path] = own
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return ()
    largest: dict[str, int] = max(several, key=lambda group: (sum(group.values()), -len(group)))
    return tuple(largest)


def _more_operations(estimated: Callable[[StepChanges], Estimate], chosen: StepChanges) -> float:
    if not chosen.checkpointed:
        return 0.0
    without: list[int] = []
    recomputing: list[int] = []
    estimated(replace(chosen, checkpointed=(), operations=without))
    estimated(replace(chosen, operations=recomputing))
    return recomputing[-1] / without[-1] - 1 if without[-1] else 0.0


_UNKNOWN = "the model is unknown: pass model= to memlog.estimate"


class StepChanges(PlannedChanges, frozen=True, kw_only=True):
    """Changes of a step that an estimate runs. Of other optimizers, it knows Adafactor.

    Attributes:
        operations: List to which each step appends its number of floating-point operations; ``None``: they
            are not counted. Counting changes the memory of the step.
    """

    operations: list[int] | None = None

    def shard(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """Shard the model if this is a change, and give the optimizers its new parameters.

        The model stays so.

        Raises:
            ConfigurationError: The model is unknown, or distributed already.
        """
        if self.sharded is None:
            return
        # They load torch.distributed, which takes half a second.
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        if model is None:
            raise ConfigurationError(_UNKNOWN)
        is_replicated = any(
            isinstance(submodule, DistributedDataParallel) for submodule in model.modules()
        )
        if is_replicated or any(map(is_distributed, model.parameters())):
            raise ConfigurationError("the model is distributed already")
        # Sharding replaces the parameters. Modules and names then lead to the new ones.
        homes = {
            id(parameter): (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        policy = CPUOffloadPolicy() if self.parameters_on_host else OffloadPolicy()
        # The model is last: `fully_shard` takes the parameters that earlier calls have left.
        for module in (*map(model.get_submodule, self.sharded), model):
            fully_shard(module, offload_policy=policy)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [
                getattr(*homes[id(old)]) if id(old) in homes else old for old in group["params"]
            ]

    @contextmanager
    def made(
        self, step: Callable[[], object], model: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> Iterator[tuple[Callable[[], object], Sequence[Optimizer]]]:
        """Make the changes inside the block, all but sharding.

        Yield the changed step, which trains with one whole batch, and the optimizers that then step.

        Raises:
            ConfigurationError: The model is unknown.
        """
        if model is None and self.checkpointed:
            raise ConfigurationError(_UNKNOWN)
        with ExitStack() as stack:
            modules = {} if model is None else dict(model.named_modules())
            for module in map(modules.__getitem__, self.checkpointed):
                forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                stack.enter_context(patch.object(module, "forward", forward))
            stepping = optimizers
            if self.optimizer:
                stepping = [
                    torch.optim.Adafactor(_only_parameters(replaced)) for replaced in optimizers
                ]
                for optimizer, other in zip(optimizers, stepping, strict=True):
                    stack.enter_context(patch.object(optimizer, "step", other.step))
            for optimizer in stepping if self.one_by_one else ():
                for group in optimizer.param_groups:
                    stack.enter_context(patch.dict(group, {"foreach": False}))
            yield functools.partial(self._run, step, model, optimizers), stepping

    def _run(
        self, step: Callable[[], object], model: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> object:
        with (
            _counting(self.operations) if self.operations is not None else nullcontext(),
            _in_bfloat16() if self.autocast else nullcontext(),
            torch.autograd.graph.save_on_cpu(pin_memory=True) if self.on_host else nullcontext(),
        ):
            if self.parts == 1:
                return step()
            # The peak of the second part is that of all later ones: gradients are there from the first.
            with _in_part(model, optimizers, is_last=False):
                step()
            with _in_part(model, optimizers, is_last=True):
                return step()


NO_CHANGES = StepChanges()


def _only_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in optimizer.param_groups]


@contextmanager
def _counting(operations: list[int]) -> Iterator[None]:
    # Without triton, this module warns when it is loaded that triton's kernels don't count.
    log = logging.getLogger("torch.utils.flop_counter")
    before = log.level
    log.setLevel(logging.ERROR)
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - rarely needed

    log.setLevel(before)
    with FlopCounterMode(display=False) as counter:
        yield
    operations.append(counter.get_total_flops())


@contextmanager
def _in_bfloat16() -> Iterator[None]:
    """Let operations run under autocast, as if the context ended before each backward pass."""
    backward = torch.autograd.backward
    autocast = torch.autocast("cuda", dtype=torch.bfloat16)

    @functools.wraps(backward)
    def without(*args: Any, **kwargs: Any) -> None:
        autocast.__exit__(None, None, None)
        try:
            backward(*args, **kwargs)
        finally:
            autocast.__enter__()

    with patch.object(torch.autograd, "backward", without), autocast:
        yield


@contextmanager
def _in_part(
    model: nn.Module | None, optimizers: Sequence[Optimizer], *, is_last: bool
) -> Iterator[None]:
    """Let the optimizers step in the last part of a batch only.

    A step clears the gradients before its backward pass or after the optimizer's step. So that the parts'
    gradients add up, they are cleared before the first part or after the last one.
    """
    stepped = False

    def clears(clear: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if stepped == is_last:
            clear(*args, **kwargs)

    def steps(take: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        nonlocal stepped
        stepped = True
        return take(*args, **kwargs) if is_last else None

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(
                patch.object(optimizer, "step", functools.partial(steps, optimizer.step))
            )
        owners: list[Any] = [*optimizers, *([] if model is None else [model])]
        for owner in owners:
            clear = functools.partial(clears, owner.zero_grad)
            stack.enter_context(patch.object(owner, "zero_grad", clear))
        yield
