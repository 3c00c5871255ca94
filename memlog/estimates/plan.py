"""Plan: the cheapest changes with which a training step fits into a device's memory.

Changes are not added up: each combination that is tried is an estimate of the step with all its changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from memlog.errors import ConfigurationError
from memlog.estimates.changes import NO_CHANGES, StepChanges
from memlog.trace.predict import advise
from memlog.trace.predict.fitting import (
    Choices,
    FittingPlan,
    PlannedChanges,
    PlanSearch,
    plan_steps,
)
from memlog.trace.predict.lifetimes import TracedStep
from memlog.trace.predict.plan_code import plan_code

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
    parts = [one for one in range(1, batch + 1) if batch % one == 0]
    choices = Choices(NO_CHANGES, parts, modules, others)
    chosen, fits = PlanSearch(ask, choices, memory).cheapest()
    last = ask(chosen) or base
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
        own = sum(sum(parameters.get(each, ())) for each in traced.subtree(layer))
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
