"""Limits of a test's memory: the conditions of ``@pytest.mark.memory``, and their verdict on the test's run.

::

    @pytest.mark.memory(trace_peak="< 2 GiB", growth="none", vs="baseline +1 %")

A condition says what must hold. ``trace_peak`` and the other figures of `memlog compare` have an absolute
limit; the first underscore stands for the dot. ``growth="none"`` demands that the tensors in use after the
steps do not become more, and that memlog finds no growth. ``vs`` limits the change of ``trace.peak`` since
the test's entry in the baseline file was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memlog._internal.terminal import format_bytes
from memlog._internal.text_parser import ComparisonSign
from memlog.errors import ConfigurationError, RunNotFoundError
from memlog.facts.run_fold import facts_of
from memlog.facts.verdict import verdict
from memlog.journal import RunDirectory
from memlog.reports.figures import TRACE_PEAK, RunFigures, run_figures
from memlog.reports.gates import (
    Baseline,
    Gate,
    baseline_of,
    find_baseline,
    judge,
    parse_gate,
    read_baselines,
    update_baselines,
)

if TYPE_CHECKING:
    from memlog.testing.tensor_growth import TensorGrowth

_OPPOSITE: dict[ComparisonSign, ComparisonSign] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_AGAINST = re.compile(r"\s*baseline\s*(.*)", re.DOTALL)
_EXAMPLE = 'memory(trace_peak="< 2 GiB", growth="none", vs="baseline +1 %")'
FEWEST_STEPS = 12
"""If a test makes fewer steps than this, growth is not judged."""
_LARGEST = 4
"""Number of categories and layers that a message names."""


class Limits(msgspec.Struct, frozen=True):
    """Conditions of a test, in the form of gates, which fail if the condition does not hold."""

    gates: tuple[Gate, ...] = ()
    growth: bool = False
    """True if memory must not grow."""
    change: Gate | None = None
    """Limit for the change since the baseline file was written; ``None``: there is none."""


def parse_limits(conditions: Mapping[str, Any]) -> Limits:
    """Parse the conditions of a test, by the names of the marker's arguments.

    Raises:
        ConfigurationError: A condition is invalid.
    """
    gates, growth, change = [], False, None
    for name, condition in conditions.items():
        if not isinstance(condition, str):
            raise ConfigurationError(f"{name}={condition!r}: write text, as in {_EXAMPLE}")
        if name == "growth":
            if condition != "none":
                raise ConfigurationError(f'growth={condition!r}: write growth="none"')
            growth = True
        elif name == "vs":
            change = _change(condition)
        else:
            gates.append(_gate(name, condition))
    return Limits(tuple(gates), growth, change)


def _gate(name: str, condition: str) -> Gate:
    gate = parse_gate(f"{name.replace('_', '.', 1)} {condition}")
    if gate.is_change:
        raise ConfigurationError(
            f"{name}={condition!r}: write a limit without + or -, or a change as in {_EXAMPLE}"
        )
    return msgspec.structs.replace(gate, comparison=_OPPOSITE[gate.comparison])


def _change(condition: str) -> Gate:
    found = _AGAINST.fullmatch(condition)
    if found is None:
        raise ConfigurationError(f'vs={condition!r}: write vs="baseline +1 %"')
    gate = parse_gate(f"{TRACE_PEAK} > {found[1] or '+0 B'}")
    if not gate.is_change:
        raise ConfigurationError(f'vs={condition!r}: write + or -, as in vs="baseline +1 %"')
    return msgspec.structs.replace(gate, text=f"{TRACE_PEAK} vs {' '.join(condition.split())}")


class Measured(msgspec.Struct, frozen=True):
    """Figures of a test's run, and the lines about the conditions that did not hold."""

    entry: dict[str, Any]
    """The test's entry for a baseline file, as plain dicts."""
    peak: float | None
    """Highest traced peak in bytes; ``None``: no step was traced."""
    failures: tuple[str, ...]


def measure(
    directory: Path,
    limits: Limits,
    name: str,
    baseline: Path | None,
    tensors: TensorGrowth | None = None,
) -> Measured:
    """Judge a finished run.

    Args:
        directory: The run's folder.
        limits: The conditions.
        name: Name of the entry in the baseline file.
        baseline: The baseline file; ``None``: the change is not judged.
        tensors: Counts of the tensors in use; ``None``: growth is judged by the process's memory alone.
    """
    run = RunDirectory(directory)
    figures = run_figures(run)
    results = [judge(gate, None, figures) for gate in limits.gates]
    failures = []
    if limits.change is not None and baseline is not None:
        try:
            first = find_baseline(baseline, read_baselines(baseline), name)
            results.append(judge(limits.change, first, figures))
        except (ConfigurationError, RunNotFoundError) as error:
            failures.append(f"{limits.change.text!r} can't be judged: {error}")
    failures += [result.text for result in results if result.failed is not False]
    if limits.growth:
        failures += _growth(run, tensors)
    if failures:
        failures += [*_details(figures), f"`{run.command('show')}` shows the run"]
    entry = msgspec.to_builtins(baseline_of(figures))
    return Measured(entry, figures.figures.get(TRACE_PEAK), tuple(failures))


def _growth(run: RunDirectory, tensors: TensorGrowth | None) -> list[str]:
    """Return how memory grew. The process's memory varies, so if tensors were counted, they decide."""
    facts = facts_of(run)
    found = verdict(facts, facts.status(alive=False))
    if found.finding is not None and found.growth is not None:
        return [f"memory grew: {found.text}"]
    if tensors is None:
        steady = found.outcome in ("steady", "finding")  # of something else than growth
        return [] if steady else [f"growth can't be judged: {found.text}"]
    if tensors.steps < FEWEST_STEPS:
        few = f"the test makes {tensors.steps} steps, and {FEWEST_STEPS} are needed"
        return [f"growth can't be judged: {few}"]
    grew = tensors.found()
    return [] if grew is None else [f"memory grew: {grew}"]


def _details(figures: RunFigures) -> list[str]:
    lines = []
    for what, sizes in (("at the traced peak", figures.categories), ("layers", figures.layers)):
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
        if largest:
            named = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
            lines.append(f"{what}: {named}")
    if figures.figures.get(TRACE_PEAK) is None:
        lines.append(
            "no step was traced: a step begins with the call of a torch.nn.Module and ends with an "
            "optimizer's step"
        )
    return lines


def update_entries(file: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the entries of tests into a baseline file, which may be missing. Other entries stay.

    Raises:
        ConfigurationError: The file exists and is no baseline file.
        OSError: The file can't be written.
    """
    update_baselines(file, msgspec.convert(entries, dict[str, Baseline]))
