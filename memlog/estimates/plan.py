"""Plan: the cheapest changes with which a training step fits into a device's memory.

Changes are not added up: each combination that is tried is an estimate of the step with all its changes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from memlog._internal.units import format_bytes
from memlog.errors import ConfigurationError
from memlog.estimates.changes import NO_CHANGES, StepChanges
from memlog.trace.predict import advise
from memlog.trace.predict.lifetimes import TracedStep

if TYPE_CHECKING:
    from memlog.estimates.estimate import Estimate

    _Ask: TypeAlias = Callable[[StepChanges], Estimate | None]

_PER_DOUBLING: Final = 0.02
"""Cost of twice as many parts of the batch, as a fraction of the step's time. The other costs are alike.
They are rough, and only rank the combinations: small parts use a device less well, and copies to the host
take longer than what they save. Autocast makes a step faster, but it changes the numbers."""
_ONE_BY_ONE: Final = 0.01
_AUTOCAST: Final = 0.05
_CHECKPOINTING: Final = 0.3
"""Of all modules: the forward is a third of a step, and runs a second time."""
_SHARDED: Final = 0.05
"""Of each part of the batch, for which the ranks exchange the parameters and gradients."""
_ON_HOST: Final = 1.0
_PARAMETERS_ON_HOST: Final = 1.5
_ADAFACTOR: Final = 3.0
"""It costs no time, but the training needs other learning rates."""
_NAMED: Final = 3
_UNCHANGED: Final[dict[str, Any]] = {
    "adafactor": False,
    "parameters_on_host": False,
    "on_host": False,
    "checkpointed": (),
    "sharded": None,
    "autocast": False,
    "one_by_one": False,
}
"""Every change beside the parts of the batch, as it is in a step without it. The dearest comes first."""


class PlanStep(msgspec.Struct, frozen=True):
    """A change, together with those before it. Sizes are bytes, as in `Estimate`."""

    change: str
    peak: int
    needed: int
    fits: bool


class FittingPlan(msgspec.Struct, frozen=True):
    """Changes with which a step fits into ``memory`` bytes.

    Attributes:
        fits: False if the step does not fit with all changes together.
        parts: Number of parts of the batch whose gradients are accumulated.
        checkpointed: Paths of the modules to checkpoint.
        autocast: True for bfloat16 in forward and loss.
        one_by_one: True for an optimizer with ``foreach=False``.
        on_host: True for activations that wait on the host.
        sharded: Paths of the modules to shard over the ranks, beside the model itself; ``None``: no sharding.
        parameters_on_host: True for sharded parameters, gradients and optimizer state on the host.
        adafactor: True for `torch.optim.Adafactor` in place of the optimizers.
        ranks: Number of ranks that a sharded model needs.
        steps: The step as it is, and then each change together with those before it.
        operations: Floating-point operations that the changes add, as a fraction of the step's.
        moved: Bytes that sharding sends to each rank in a step, at most.
        host: Bytes that the step's tensors take on the host if a change moves some there; otherwise 0.
        without: What the figures do not count, as `Estimate.without`.
        code: Lines to paste; empty if nothing has to change, or nothing fits.
    """

    memory: int
    fits: bool
    parts: int
    checkpointed: tuple[str, ...]
    autocast: bool
    one_by_one: bool
    on_host: bool
    steps: tuple[PlanStep, ...]
    operations: float
    without: str
    code: str
    sharded: tuple[str, ...] | None = None
    parameters_on_host: bool = False
    adafactor: bool = False
    ranks: int = 1
    moved: int = 0
    host: int = 0

    def text(self) -> str:
        """Return the plan as lines of text."""
        wide = max(len(one.change) for one in self.steps)
        rows = [
            f"{one.change:<{wide}}  {format_bytes(one.peak):>10}  {format_bytes(one.needed):>10}"
            f"  {'yes' if one.fits else 'no'}"
            for one in self.steps
        ]
        head = f"{'':<{wide}}  {'peak':>10}  {'needed':>10}  fits into {format_bytes(self.memory)}"
        return "\n".join([head, *rows, *self.notes()])

    def notes(self) -> Iterator[str]:
        if self.without:
            yield f"Not counted: {self.without}."
        if not self.fits:
            more = "more devices" if self.ranks > 1 else "several devices (--ranks 8, ranks=8)"
            yield f"It does not fit with all these changes: use {more}, or a smaller model."
        if self.operations:
            yield f"The step computes {self.operations:.0%} more."
        if self.moved:
            yield f"Sharding sends up to {format_bytes(self.moved)} to each rank in a step."
        if self.host:
            yield f"On the host, the step's tensors take {format_bytes(self.host)} for each rank."
        if self.adafactor:
            yield "Adafactor is another method: the training needs other learning rates."
        if self.autocast:
            yield "Forward and loss have the precision of bfloat16."
        elif not self.adafactor and (self.parts > 1 or self.checkpointed):
            yield "The training stays the same, except for batch norms."


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

    ranks = base.ranks or 1
    chosen, is_enough = (
        (NO_CHANGES, True) if base.fits(memory) else _Search(ask, base, memory).cheapest()
    )
    last = ask(chosen) or base
    sent = 3 * chosen.parts * sum(_parameters(base).values()) * (ranks - 1) // ranks
    return FittingPlan(
        memory,
        is_enough,
        chosen.parts,
        chosen.checkpointed,
        chosen.autocast,
        chosen.one_by_one,
        chosen.on_host,
        tuple(_steps(ask, base, chosen, memory)),
        _more_operations(estimated, chosen),
        last.without,
        _code(chosen, ranks) if is_enough else "",
        chosen.sharded,
        chosen.parameters_on_host,
        chosen.adafactor,
        ranks,
        sent if chosen.sharded is not None else 0,
        last.on_host if chosen.on_host or chosen.parameters_on_host else 0,
    )


class _Search:
    """Search for the cheapest changes with which a step fits, by few estimates."""

    def __init__(self, ask: _Ask, base: Estimate, memory: int) -> None:
        self._ask = ask
        self._memory = memory
        self._failed: list[StepChanges] = []
        batch = base.batch or 1
        self._parts = [one for one in range(1, batch + 1) if batch % one == 0]
        # An `Estimate` of several ranks has no hints, because their figures do not hold there.
        hints = advise(base.recording).hints
        self._modules = next((hint.modules for hint in hints if hint.modules), ())
        shards = None if (base.ranks or 1) == 1 else _repeated(base)
        self._all = StepChanges(
            one_by_one=True,
            checkpointed=self._modules,
            autocast=True,
            on_host=True,
            sharded=shards,
            parameters_on_host=shards is not None,
            adafactor=True,
        )

    def cheapest(self) -> tuple[StepChanges, bool]:
        """Return changes, and whether they are enough. If none are, return all that are possible."""
        parts = self._parts
        del parts[parts.index(self._most_parts()) + 1 :]
        strongest = StepChanges(parts=parts[-1])
        for name in reversed(_UNCHANGED):
            if self._fits(strongest):
                break
            more = _changed(strongest, name, getattr(self._all, name))
            if more != strongest and self._ask(more) is not None:
                strongest = more
        chosen = strongest
        if not self._fits(chosen):
            chosen = replace(strongest, autocast=False)
        if not self._fits(chosen):
            return strongest, False
        for name, unchanged in _UNCHANGED.items():
            weaker = _changed(chosen, name, unchanged)
            chosen = weaker if self._fits(weaker) else chosen
        chosen = self._fewest(chosen, parts)
        # From the strongest on: what does not fit then rules out most others.
        for kind in sorted(_weaker(strongest), key=self._cost, reverse=True):
            cheaper = [
                each for each in parts if self._cost(replace(kind, parts=each)) < self._cost(chosen)
            ]
            if cheaper and self._fits(replace(kind, parts=cheaper[-1])):
                chosen = self._fewest(kind, cheaper)
        return chosen, True

    def _most_parts(self) -> int:
        """Return the most parts of the batch with which the step runs. A batch norm refuses one sample."""
        possible = (each for each in self._parts[:-3:-1] if self._ask(StepChanges(parts=each)))
        return next(possible, 1)

    def _fits(self, changes: StepChanges) -> bool:
        if any(_is_part(changes, of) for of in self._failed):
            return False
        found = self._ask(changes)
        if found is None or found.fits(self._memory):
            return found is not None
        self._failed.append(changes)
        return False

    def _fewest(self, changes: StepChanges, parts: Sequence[int]) -> StepChanges:
        """Return the changes with the fewest parts of the batch that fit. With the most, they do."""
        low, high = 0, len(parts) - 1
        if self._fits(replace(changes, parts=parts[0])):
            high = 0
        while low < high:
            middle = (low + high) // 2
            fits = self._fits(replace(changes, parts=parts[middle]))
            low, high = (low, middle) if fits else (middle + 1, high)
        return replace(changes, parts=parts[high])

    def _cost(self, changes: StepChanges) -> float:
        return (
            _PER_DOUBLING * math.log2(changes.parts)
            + _ONE_BY_ONE * changes.one_by_one
            + _AUTOCAST * changes.autocast
            + _SHARDED * changes.parts * (changes.sharded is not None)
            + _CHECKPOINTING * len(changes.checkpointed) / max(len(self._modules), 1)
            + _ON_HOST * changes.on_host
            + _PARAMETERS_ON_HOST * changes.parameters_on_host
            + _ADAFACTOR * changes.adafactor
        )


def _changed(kind: StepChanges, name: str, value: Any) -> StepChanges:
    changed = replace(kind, **{name: value})
    return replace(changed, parameters_on_host=False) if changed.sharded is None else changed


def _weaker(strongest: StepChanges) -> Iterator[StepChanges]:
    """Yield all combinations of the changes of ``strongest``, and of fewer checkpointed modules."""
    modules = strongest.checkpointed
    values: dict[str, dict[Any, None]] = {
        name: dict.fromkeys((unchanged, getattr(strongest, name)))
        for name, unchanged in _UNCHANGED.items()
    }
    values["checkpointed"] = dict.fromkeys(((), modules[::2], modules))
    for each in itertools.product(*values.values()):
        kind = replace(strongest, **dict(zip(values, each, strict=True)))
        if kind.sharded is not None or not kind.parameters_on_host:
            yield kind


def _parameters(base: Estimate) -> dict[str, int]:
    """Return the bytes of each layer's own parameters, by the layer's path."""
    traced = TracedStep(base.recording)
    return {traced.paths[layer]: sum(sizes) for layer, sizes in traced.parameters().items()}


def _repeated(base: Estimate) -> tuple[str, ...]:
    """Return the paths of sibling modules of one class that have most parameters; empty if there are none."""
    parameters, traced = _parameters(base), TracedStep(base.recording)
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for layer in sorted({call.layer for call in traced.calls} - {1}):
        path = traced.paths[layer]
        own = sum(
            size for at, size in parameters.items() if at == path or at.startswith(f"{path}.")
        )
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


def _is_part(changes: StepChanges, of: StepChanges) -> bool:
    # One part alone needs no room for gradients of the parts before, and without autocast there are no copies
    # of parameters.
    parts = changes.parts == of.parts or 1 < changes.parts < of.parts
    return (parts and changes.autocast == of.autocast) and all(
        getattr(changes, name) in (unchanged, getattr(of, name))
        or (name == "checkpointed" and set(changes.checkpointed) <= set(of.checkpointed))
        for name, unchanged in _UNCHANGED.items()
    )


def _steps(ask: _Ask, base: Estimate, chosen: StepChanges, memory: int) -> Iterator[PlanStep]:
    yield _step("as it is" if base.batch is None else f"a batch of {base.batch:,}", base, memory)
    made = NO_CHANGES
    for name in ("one_by_one", "parts", *reversed(_UNCHANGED)):
        value = getattr(chosen, name)
        if value != getattr(made, name):
            made = replace(made, **{name: value})
            found = ask(made)
            if found is not None:
                told = _told(name, chosen, base.batch or 1, base.ranks or 1)
                yield _step(f"+ {told}", found, memory)


def _step(change: str, found: Estimate, memory: int) -> PlanStep:
    return PlanStep(change, found.peak, found.needed, found.fits(memory))


def _told(name: str, changes: StepChanges, batch: int, ranks: int) -> str:
    if name == "parts":
        each = batch // changes.parts
        return f"gradient accumulation: {changes.parts:,} parts of {each:,}"
    if name == "checkpointed":
        return f"checkpointing of {_some(changes.checkpointed)}"
    if name == "sharded":
        blocks = _some(changes.sharded or ())
        return f"sharding over {ranks:,} ranks (fully_shard)" + (
            blocks and f", {blocks} one by one"
        )
    return {
        "one_by_one": "optimizer with foreach=False",
        "autocast": "forward and loss in bfloat16 (autocast)",
        "on_host": "activations on the host (save_on_cpu)",
        "parameters_on_host": "sharded parameters on the host (CPUOffloadPolicy)",
        "adafactor": "torch.optim.Adafactor",
    }[name]


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _code(changes: StepChanges, ranks: int) -> str:
    lines = []
    if changes.checkpointed:
        lines += [
            "# After the model is made:",
            "from functools import partial",
            "from torch.utils.checkpoint import checkpoint",
            f"for path in {list(changes.checkpointed)}:",
            "    module = model.get_submodule(path)",
            "    module.forward = partial(checkpoint, module.forward, use_reentrant=False)",
        ]
    if changes.sharded is not None:
        imported = "CPUOffloadPolicy, fully_shard" if changes.parameters_on_host else "fully_shard"
        policy = ", offload_policy=CPUOffloadPolicy()" * changes.parameters_on_host
        backend = "cpu:gloo,cuda:nccl" if changes.parameters_on_host else "nccl"
        lines += [
            f"# Start {ranks} processes: torchrun --nproc-per-node {ranks} (or --nnodes). Give each rank its "
            "own samples.",
            "# When the model is made on the CPU, in place of model.cuda(), before the optimizer is made:",
            "import os",
            f"from torch.distributed.fsdp import {imported}",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            f'torch.distributed.init_process_group("{backend}")',
        ]
        if changes.sharded:
            lines += [
                f"for path in {list(changes.sharded)}:",
                f"    fully_shard(model.get_submodule(path){policy})",
            ]
        lines += [f"fully_shard(model{policy})"]
    if changes.adafactor:
        lines += ["# The optimizer:", "optimizer = torch.optim.Adafactor(model.parameters())"]
    if changes.one_by_one:
        lines += ["# Where the optimizer is made: pass", "foreach=False"]
    contexts = ['torch.autocast("cuda", dtype=torch.bfloat16)'] * changes.autocast
    contexts += ["torch.autograd.graph.save_on_cpu(pin_memory=True)"] * changes.on_host
    inside = [f"with {', '.join(contexts)}:"] if contexts else []
    indent = "    " * bool(contexts)
    if changes.parts > 1:
        lines += [
            "# The step. The batch is on the host, and its parts go to the device:",
            f"for part in batch.chunk({changes.parts}):",
            *(f"    {line}" for line in inside),
            f"    {indent}loss = ...  # of this part",
            f"    (loss / {changes.parts}).backward()",
            "optimizer.step()",
            "optimizer.zero_grad()",
        ]
    elif contexts:
        lines += ["# Around the forward pass and the loss:", *inside, "    loss = ..."]
    return "\n".join(lines)
