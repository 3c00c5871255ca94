"""Plan: the cheapest changes with which a training step fits into a device's memory.

Changes are not added up: each combination that is tried is an estimate of the step with all its changes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from memlog._internal.units import format_bytes
from memlog.errors import ConfigurationError
from memlog.estimates.changes import NO_CHANGES, StepChanges

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
_ON_HOST: Final = 1.0
_NAMED: Final = 3


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
        steps: The step as it is, and then each change together with those before it.
        operations: Floating-point operations that the changes add, as a fraction of the step's.
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
            yield "It does not fit with all these changes: use several devices, or a smaller model."
        if self.operations:
            yield f"The step computes {self.operations:.0%} more."
        if self.autocast:
            yield "Forward and loss have the precision of bfloat16."
        elif self.parts > 1 or self.checkpointed:
            yield "The training stays the same, except for batch norms."


def refuse_plan(device: str, ranks: int | None) -> None:
    """Raise if there is no plan for such an estimate.

    Raises:
        ConfigurationError: The estimate is for the CPU or for several ranks.
    """
    if device == "cpu":
        raise ConfigurationError("a plan is for a CUDA device: leave out --cpu (device='cpu')")
    if ranks is not None:
        raise ConfigurationError("a plan is for one device: leave out --ranks (ranks=)")


def plan(estimated: Callable[[StepChanges], Estimate], memory: int) -> FittingPlan:
    """Return the cheapest changes with which a step fits into ``memory`` bytes.

    ``estimated`` returns the estimate of the step with changes. If its batch is known, ``parts`` divides it.
    """
    base = estimated(NO_CHANGES)

    @functools.cache
    def ask(changes: StepChanges) -> Estimate | None:
        try:
            return base if changes == NO_CHANGES else estimated(changes)
        except ConfigurationError:
            return None  # such as checkpointing of modules that can't run twice

    batch = base.batch or 1
    several = [one for one in range(1, batch + 1) if batch % one == 0]
    modules = next((hint.modules for hint in base.advice.hints if hint.modules), ())
    kinds = [
        StepChanges(one_by_one=each, checkpointed=some, autocast=cast, on_host=host)
        for each, some, cast, host in itertools.product(
            (False, True), dict.fromkeys(((), modules[::2], modules)), (False, True), (False, True)
        )
    ]
    cost = functools.partial(_cost, count=len(modules))
    best: StepChanges | None = None if not base.fits(memory) else NO_CHANGES
    failed: list[StepChanges] = []
    strongest = max(kinds, key=cost)
    for kind in [strongest, *sorted(kinds, key=cost)] if best is None else ():
        if any(_is_part(kind, of) for of in failed):
            continue
        cheaper = [
            one for one in several if best is None or cost(replace(kind, parts=one)) < cost(best)
        ]
        found = _fewest(ask, kind, cheaper, memory)
        if found is not None:
            best = found
        elif cheaper == several and ask(replace(kind, parts=several[-1])) is not None:
            failed.append(kind)
    chosen = best or replace(max(failed, key=cost), parts=several[-1])
    last = ask(chosen) or base
    return FittingPlan(
        memory,
        best is not None,
        chosen.parts,
        chosen.checkpointed,
        chosen.autocast,
        chosen.one_by_one,
        chosen.on_host,
        tuple(_steps(ask, base, chosen, memory)),
        _more_operations(estimated, chosen),
        last.without,
        _code(chosen) if best is not None else "",
    )


def _more_operations(estimated: Callable[[StepChanges], Estimate], chosen: StepChanges) -> float:
    if not chosen.checkpointed:
        return 0.0
    without: list[int] = []
    recomputing: list[int] = []
    estimated(replace(chosen, checkpointed=(), operations=without))
    estimated(replace(chosen, operations=recomputing))
    return recomputing[-1] / without[-1] - 1 if without[-1] else 0.0


def _cost(changes: StepChanges, count: int) -> float:
    return (
        _PER_DOUBLING * math.log2(changes.parts)
        + _ONE_BY_ONE * changes.one_by_one
        + _AUTOCAST * changes.autocast
        + _CHECKPOINTING * len(changes.checkpointed) / max(count, 1)
        + _ON_HOST * changes.on_host
    )


def _is_part(kind: StepChanges, of: StepChanges) -> bool:
    return (
        kind.one_by_one <= of.one_by_one
        and kind.autocast <= of.autocast
        and kind.on_host <= of.on_host
        and set(kind.checkpointed) <= set(of.checkpointed)
    )


def _fewest(ask: _Ask, kind: StepChanges, parts: Sequence[int], memory: int) -> StepChanges | None:
    """Return the changes with the fewest parts of the batch that fit; ``None`` if even the most do not."""

    def fits(at: int) -> bool:
        found = ask(replace(kind, parts=parts[at]))
        return found is not None and found.fits(memory)

    low, high = 0, len(parts) - 1
    if high < 0 or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return replace(kind, parts=parts[high])


def _steps(ask: _Ask, base: Estimate, chosen: StepChanges, memory: int) -> Iterator[PlanStep]:
    yield _step("as it is" if base.batch is None else f"a batch of {base.batch:,}", base, memory)
    made = replace(
        chosen, parts=1, checkpointed=(), autocast=False, one_by_one=False, on_host=False
    )
    for name in ("one_by_one", "parts", "autocast", "checkpointed", "on_host"):
        value = getattr(chosen, name)
        if value != getattr(made, name):
            made = replace(made, **{name: value})
            found = ask(made)
            if found is not None:
                yield _step(f"+ {_told(name, chosen, base.batch or 1)}", found, memory)


def _step(change: str, found: Estimate, memory: int) -> PlanStep:
    return PlanStep(change, found.peak, found.needed, found.fits(memory))


def _told(name: str, changes: StepChanges, batch: int) -> str:
    if name == "parts":
        each = batch // changes.parts
        return f"gradient accumulation: {changes.parts:,} parts of {each:,}"
    if name == "checkpointed":
        paths = ", ".join(changes.checkpointed[:_NAMED])
        more = len(changes.checkpointed) - _NAMED
        return f"checkpointing of {paths}" + (f" and {more} more" if more > 0 else "")
    return {
        "one_by_one": "optimizer with foreach=False",
        "autocast": "forward and loss in bfloat16 (autocast)",
        "on_host": "activations on the host (save_on_cpu)",
    }[name]


def _code(changes: StepChanges) -> str:
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
    if changes.one_by_one:
        lines += ["# Where the optimizer is made: pass", "foreach=False"]
    contexts = ['torch.autocast("cuda", dtype=torch.bfloat16)'] * changes.autocast
    contexts += ["torch.autograd.graph.save_on_cpu(pin_memory=True)"] * changes.on_host
    inside = [f"with {', '.join(contexts)}:"] if contexts else []
    indent = "    " * bool(contexts)
    if changes.parts > 1:
        lines += [
            "# The step:",
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
