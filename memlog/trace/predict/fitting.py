"""Plan: the cheapest changes with which a training step fits into a memory, as text and as code to paste.

The peak of each combination comes from the caller. `memlog.estimates.plan` runs the changed step on fake
tensors. `memlog.trace.predict.plan` computes the peak from a traced step. Changes are never added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from memlog._internal.terminal import format_bytes

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
MOMENTUM: Final = "torch.optim.SGD(momentum=0.9)"
NO_STATE: Final = "torch.optim.SGD(momentum=0)"
_OPTIMIZER: Final = 10.0
"""Above the sum of all others, so another optimizer is the last resort."""
_DIFFERENT: Final = {MOMENTUM: 20.0, NO_STATE: 30.0}
"""Optimizers that train with another rule, and not only with the same state in fewer bits."""
_NAMED: Final = 3
_ORDER: Final = (
    "one_by_one",
    "parts",
    "autocast",
    "sharded",
    "checkpointed",
    "on_host",
    "parameters_on_host",
    "optimizer",
)
"""Order in which a plan lists its changes."""


class PlannedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that are made together.

    Attributes:
        parts: Number of parts of the batch whose gradients are accumulated. The batch is one part.
        checkpointed: Paths of the modules in ``torch.utils.checkpoint``.
        autocast: True if forward and loss run in bfloat16 where that is safe (``torch.autocast``).
        one_by_one: True if optimizers update one parameter after the other (``foreach=False``).
        on_host: True if activations wait on the host for the backward pass (``save_on_cpu``).
        optimizer: Class in place of the step's optimizers, with its arguments; empty: the same as now.
        sharded: Paths of the modules that are sharded over the ranks one by one, and the rest of the model
            with the model itself (``fully_shard``, FSDP2). ``None``: the model is not sharded.
        parameters_on_host: True if the sharded parameters, their gradients and the optimizer's state are on
            the host (``CPUOffloadPolicy``).
    """

    parts: int = 1
    checkpointed: tuple[str, ...] = ()
    autocast: bool = False
    one_by_one: bool = False
    on_host: bool = False
    optimizer: str = ""
    sharded: tuple[str, ...] | None = None
    parameters_on_host: bool = False


class StepMemoryNeed(Protocol):
    """Memory of a step with changes."""

    @property
    def peak(self) -> int:
        """Peak of the tensors, in bytes."""

    @property
    def needed(self) -> int:
        """Bytes of memory that should be enough for the step."""

    def fits(self, memory: int) -> bool:
        """Return True if the step fits into ``memory`` bytes."""


_Changes = TypeVar("_Changes", bound=PlannedChanges)
_Ask = Callable[[_Changes], StepMemoryNeed | None]


class PlanStep(msgspec.Struct, frozen=True):
    """A change, together with those before it. Sizes are bytes, as in `StepMemoryNeed`."""

    change: str
    """The change, in words; the first entry is the step as it is."""
    peak: int
    """Predicted peak."""
    needed: int
    """Bytes that should be enough for the step."""
    fits: bool
    """True if ``needed`` fits."""


class FittingPlan(PlannedChanges, frozen=True, kw_only=True):
    """Changes with which a step fits into ``memory`` bytes.

    Attributes:
        memory: Bytes of memory.
        fits: False if the step does not fit with all changes together.
        steps: The step as it is, and then each change together with those before it.
        operations: Floating-point operations that the changes add, as a fraction of the step's; ``None``:
            unknown.
        without: What the figures do not count, in a few words.
        code: Lines to paste; empty if nothing has to change, or nothing fits.
        time: Time that checkpointing adds, as a fraction of the step's; ``None``: unknown.
        remarks: Sentences on what the plan assumes.
        ranks: Number of processes that train together.
        moved: Bytes that sharding sends to each rank in a step, at most.
        host: Bytes that the step's tensors take on the host if a change moves some there; otherwise 0.
    """

    memory: int
    fits: bool
    steps: tuple[PlanStep, ...]
    operations: float | None
    without: str
    code: str
    time: float | None = None
    remarks: tuple[str, ...] = ()
    ranks: int = 1
    moved: int = 0
    host: int = 0

    def text(self) -> str:
        """Return the plan as lines of text."""
        wide = max(len(step.change) for step in self.steps)
        rows = [
            f"{step.change:<{wide}}  {format_bytes(step.peak):>10}  {format_bytes(step.needed):>10}"
            f"  {'yes' if step.fits else 'no'}"
            for step in self.steps
        ]
        head = f"{'':<{wide}}  {'peak':>10}  {'needed':>10}  fits into {format_bytes(self.memory)}"
        return "\n".join([head, *rows, *self.notes()])

    def notes(self) -> Iterator[str]:
        if self.without:
            yield f"Not counted: {self.without}."
        if not self.fits:
            more = "more devices" if self.ranks > 1 else "several devices"
            yield f"It does not fit with all these changes: use {more}, or a smaller model."
        if self.operations:
            yield f"The step computes {self.operations:.0%} more."
        if self.time is not None:
            yield f"The second forward of the checkpointed modules adds {self.time:.0%} to the step's time."
        if self.moved:
            yield f"Sharding sends up to {format_bytes(self.moved)} to each rank in a step."
        if self.host:
            yield f"On the host, the step's tensors take {format_bytes(self.host)} for each rank."
        if self.optimizer:
            yield "Another optimizer changes the training: its learning rate has to be found again."
        if self.autocast:
            yield "Forward and loss have the precision of bfloat16."
        elif not self.optimizer and (self.parts > 1 or self.checkpointed):
            yield "The training stays the same, except for batch norms."
        yield from self.remarks


class Choices(Generic[_Changes]):
    """Changes that a plan may make, and what they cost.

    Args:
        unchanged: No changes.
        parts: Numbers of parts of the batch, rising, of which the first is 1.
        modules: Paths of the modules that are worth checkpointing.
        others: Values of each other change by its attribute's name: first the value without the change, then
            those that save more and more.

    Attributes:
        options: Values of each change but parts, those of cheap changes first.
    """

    def __init__(
        self,
        unchanged: _Changes,
        parts: Sequence[int],
        modules: tuple[str, ...],
        others: Mapping[str, Sequence[Any]],
    ) -> None:
        self.unchanged = unchanged
        self.parts = parts
        self._modules = modules
        # Without duplicates: of a single module, every second one is all of them.
        checkpointed = tuple(dict.fromkeys(((), modules[::2], modules)))
        values = {**others, "checkpointed": checkpointed}
        self.options = {name: values[name] for name in _ORDER if name in values}

    def second_forward(self, checkpointed: Sequence[str]) -> float:
        """Return the time of these modules' second forward, as a fraction of the step's."""
        return _CHECKPOINTING * len(checkpointed) / max(len(self._modules), 1)

    def cost(self, changes: _Changes) -> float:
        """Return a rough cost of changes, as a fraction of the step's time, to rank them."""
        optimizer = _DIFFERENT.get(changes.optimizer, _OPTIMIZER if changes.optimizer else 0.0)
        return (
            _PER_DOUBLING * math.log2(changes.parts)
            + _ONE_BY_ONE * changes.one_by_one
            + _AUTOCAST * changes.autocast
            + self.second_forward(changes.checkpointed)
            + _SHARDED * changes.parts * (changes.sharded is not None)
            + _ON_HOST * changes.on_host
            + _PARAMETERS_ON_HOST * changes.parameters_on_host
            + optimizer
        )


class PlanSearch(Generic[_Changes]):
    """Search for the cheapest changes with which a step fits into a memory, by few questions.

    Args:
        ask: Returns the memory of the step with changes; ``None``: the step can't make them.
        choices: Changes that the plan may make.
        memory: Bytes of memory.
    """

    def __init__(self, ask: _Ask[_Changes], choices: Choices[_Changes], memory: int) -> None:
        self._ask = ask
        self._choices = choices
        self._memory = memory
        self._failed: dict[_Changes, int] = {}

    def cheapest(self) -> tuple[_Changes, bool]:
        """Return the cheapest changes with which the step fits, and True.

        If it fits with none, return those with which it needs least, and False.
        """
        if self._fits(self._choices.unchanged):
            return self._choices.unchanged, True
        parts = self._possible_parts()
        strongest = self._strongest(parts[-1])
        # Autocast's copies of parameters, and accumulated gradients, can be larger than what they save.
        fewer = (
            replace(strongest, parts=count, autocast=cast)
            for count in (parts[-1], 1)
            for cast in (strongest.autocast, False)
        )
        chosen = next(filter(self._fits, fewer), None)
        if chosen is None:
            return min(
                self._failed,
                key=lambda changes: (self._failed[changes], -self._choices.cost(changes)),
            ), False
        # The costly changes first: each that is not needed is left out.
        for name, (without, *_) in reversed(list(self._choices.options.items())):
            weaker = _changed(chosen, name, without)
            chosen = weaker if self._fits(weaker) else chosen
        chosen = self._with_fewest(chosen, parts)
        # From the strongest on: what does not fit then rules out most others.
        for kind in sorted(self._kinds(strongest), key=self._choices.cost, reverse=True):
            cheaper = [
                count
                for count in parts
                if self._choices.cost(replace(kind, parts=count)) < self._choices.cost(chosen)
            ]
            # With any number in between, the step needs at least as much as with the most parts.
            if cheaper and any(
                self._fits(replace(kind, parts=count)) for count in {cheaper[-1], 1}
            ):
                chosen = self._with_fewest(kind, cheaper)
        return chosen, True

    def _possible_parts(self) -> Sequence[int]:
        """Return the numbers of parts with which the step runs. A batch norm refuses one sample."""
        for count in self._choices.parts[:-3:-1]:
            if self._ask(replace(self._choices.unchanged, parts=count)) is not None:
                return self._choices.parts[: self._choices.parts.index(count) + 1]
        return self._choices.parts[:1]

    def _strongest(self, parts: int) -> _Changes:
        """Return the cheap changes until the step fits, or all changes that it can make."""
        changes = replace(self._choices.unchanged, parts=parts)
        for name, (_, *values) in self._choices.options.items():
            for value in values:
                if self._fits(changes):
                    return changes
                more = _changed(changes, name, value)
                if more != changes and self._ask(more) is not None:
                    changes = more
        return changes

    def _kinds(self, strongest: _Changes) -> Iterator[_Changes]:
        """Yield all combinations of changes that are not stronger than those of ``strongest``."""
        names = list(self._choices.options)
        below = [
            values[: values.index(getattr(strongest, name)) + 1]
            for name, values in self._choices.options.items()
        ]
        for combination in itertools.product(*below):
            kind = replace(strongest, **dict(zip(names, combination, strict=True)))
            if kind.sharded is not None or not kind.parameters_on_host:
                yield kind

    def _fits(self, changes: _Changes) -> bool:
        # If stronger changes were not enough, these are not enough either.
        if any(self._is_part(changes, of) for of in self._failed):
            return False
        need = self._ask(changes)
        if need is None or need.fits(self._memory):
            return need is not None
        self._failed[changes] = need.needed
        return False

    def _is_part(self, changes: _Changes, of: _Changes) -> bool:
        # One part alone needs no room for gradients of the parts before, and without autocast there are no
        # copies of parameters.
        parts = changes.parts == of.parts or 1 < changes.parts < of.parts
        return (parts and changes.autocast is of.autocast) and all(
            values.index(getattr(changes, name)) <= values.index(getattr(of, name))
            for name, values in self._choices.options.items()
        )

    def _with_fewest(self, changes: _Changes, parts: Sequence[int]) -> _Changes:
        """Return the changes with the fewest parts that fit. With one or with the most, they do."""
        low, high = 0, len(parts) - 1
        if self._fits(replace(changes, parts=parts[0])):
            high = 0
        while low < high:
            middle = (low + high) // 2
            fits = self._fits(replace(changes, parts=parts[middle]))
            low, high = (low, middle) if fits else (middle + 1, high)
        return replace(changes, parts=parts[high])


def _changed(changes: _Changes, name: str, value: Any) -> _Changes:
    made = replace(changes, **{name: value})
    return replace(made, parameters_on_host=False) if made.sharded is None else made


def plan_steps(
    ask: _Ask[_Changes],
    chosen: _Changes,
    memory: int,
    batch: int | None,
    as_it_is: str,
    ranks: int = 1,
) -> Iterator[PlanStep]:
    """Yield the step as it is, and then each change together with those before it.

    ``batch`` is the size of the whole batch; ``None``: unknown.
    """
    made = type(chosen)()
    said = as_it_is
    for name in ("", *_ORDER):
        if name:
            value = getattr(chosen, name)
            if value == getattr(made, name):
                continue
            made = replace(made, **{name: value})
            said = f"+ {_told(name, chosen, batch, ranks)}"
        need = ask(made)
        if need is not None:
            yield PlanStep(said, need.peak, need.needed, need.fits(memory))


def _told(name: str, changes: PlannedChanges, batch: int | None, ranks: int) -> str:
    if name == "parts":
        size = "" if batch is None else f" of {batch // changes.parts:,}"
        return f"gradient accumulation: {changes.parts:,} parts{size}"
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
        "optimizer": f"{changes.optimizer} as the optimizer",
    }[name]


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_PARTS_MOVED: Final = ". The batch is on the host, and its parts go to the device:"


def plan_code(
    changes: PlannedChanges, device: str = "cuda", *, ranks: int = 1, whole_batch: bool = False
) -> str:
    """Return lines to paste into a program that make the changes.

    Args:
        changes: The changes.
        device: Type of the device, such as ``cuda``.
        ranks: Number of processes that train together.
        whole_batch: True if the figures of the plan count the whole batch on the device.
    """
    lines = []
    if changes.checkpointed:
        lines += [
            # A cache of keys would get those of the second forward, too.
            "# After the model is made (a model of transformers with use_cache=False in its configuration):",
            "from functools import partial",
            "from torch.utils.checkpoint import checkpoint",
            f"for path in {list(changes.checkpointed)}:",
            "    module = model.get_submodule(path)",
            "    module.forward = partial(checkpoint, module.forward, use_reentrant=False)",
        ]
    if changes.sharded is not None:
        on_host = changes.parameters_on_host
        policy = ", offload_policy=CPUOffloadPolicy()" * on_host
        lines += [
            f"# Start {ranks} processes: torchrun --nproc-per-node {ranks} (or --nnodes). Give each rank its "
            "own samples.",
            "# When the model is made on the CPU, in place of model.cuda(), before the optimizer is made:",
            "import os",
            f"from torch.distributed.fsdp import {'CPUOffloadPolicy, ' * on_host}fully_shard",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            f'torch.distributed.init_process_group("{"cpu:gloo,cuda:nccl" if on_host else "nccl"}")',
        ]
        if changes.sharded:
            lines += [
                f"for path in {list(changes.sharded)}:",
                f"    fully_shard(model.get_submodule(path){policy})",
            ]
        lines += [f"fully_shard(model{policy})"]
    if changes.one_by_one:
        lines += ["# Where the optimizer is made: pass", "foreach=False"]
    if changes.optimizer:
        package, _, arguments = changes.optimizer.partition("(")
        given = f", {arguments}" if arguments else ")"
        lines += [
            "# Where the optimizer is made (if there are several, in place of each):",
            f"import {package.partition('.')[0]}",
            f"optimizer = {package}(model.parameters(), lr=...{given}",
        ]
    contexts = [f'torch.autocast("{device}", dtype=torch.bfloat16)'] * changes.autocast
    contexts += ["torch.autograd.graph.save_on_cpu(pin_memory=True)"] * changes.on_host
    inside = [f"with {', '.join(contexts)}:"] if contexts else []
    indent = "    " * bool(contexts)
    if changes.parts > 1:
        lines += [
            "# The step" + (":" if whole_batch else _PARTS_MOVED),
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
