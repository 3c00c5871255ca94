"""Apply plans to more than twenty kinds of training: ``python -m benchmarks.plans [--write FILE]``.

Each training is traced, and a plan is asked for a part of its peak. The code that the plan prints is run, and
the peak of this changed training is compared with the plan's.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.__main__ import machine
from benchmarks.estimates.__main__ import peak
from benchmarks.estimates.pages import put_into
from benchmarks.plans.programs import PROGRAMS, Program
from memlog.trace.predict.fitting import FittingPlan
from memlog.trace.predict.plan import BesidesTensors, plan_for_trace
from memlog.trace.records import RecordedTrace
from memlog.tracer.window import TraceWindow

_ASKED = ((0.7, True), (0.45, True), (0.6, False), (0.0, True))
"""For each plan, its memory as a share of the training's peak, and True if the batch may be divided.

A share of 0 stands for the smallest memory that needs no other optimizer, and a twentieth more."""
_ALONE = BesidesTensors(0, "", "")
_MIB = 1024**2


class Row(NamedTuple):
    name: str
    plan: FittingPlan
    whole: int
    """Peak of the training as it is, in bytes."""
    traced: int | None
    """Traced peak with the plan's changes; ``None``: the plan does not fit, and was not applied."""
    measured: int | None
    """The same by the allocator's own count."""

    @property
    def error(self) -> float | None:
        return None if self.measured is None else self.plan.steps[-1].peak / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table into FILE")
    options = parser.parse_args()
    rows = []
    for program in PROGRAMS:
        if options.only in program.name:
            for row in rows_of(program):
                print(line(row), flush=True)
                rows.append(row)
    tables = f"{machine()}\n\n{summary(rows)}\n\n{table(rows)}\n"
    Console().print(tables, markup=False, highlight=False)
    if options.write:
        put_into(options.write, tables, "make plans-bench")


def rows_of(program: Program) -> Iterator[Row]:
    """Yield what plans say, and what their changes really take."""
    trace = trace_of(program, "")
    whole = trace.result.peak or 0
    for share, divides in _ASKED:
        batch = program.size if divides else 1
        memory = round(share * whole) if share else round(1.05 * least(trace, batch))
        plan = planned(trace, memory, batch)
        if plan.fits:
            code = plan.code
            again = trace_of(program, code).result.peak
            train(program, code)  # torch's one-time set-up is not part of the measurement
            measured = peak(functools.partial(train, program, code))
            yield Row(program.name, plan, whole, again, measured)
        else:
            yield Row(program.name, plan, whole, None, None)


def planned(trace: RecordedTrace, memory: int, batch: int) -> FittingPlan:
    plan = plan_for_trace(trace, memory, _ALONE, batch)
    assert isinstance(plan, FittingPlan), plan
    return plan


def least(trace: RecordedTrace, batch: int) -> int:
    """Return the memory that the step needs with all changes but another optimizer."""
    steps = planned(trace, 1, batch).steps
    return min(step.needed for step in steps if not step.change.endswith("as the optimizer"))


def train(program: Program, code: str) -> None:
    training = Training(program, code)
    for _ in range(2):
        training.step()


def trace_of(program: Program, code: str) -> RecordedTrace:
    """Return the trace of a later step. Earlier steps measure the operations' workspaces."""
    training = Training(program, code)
    for _ in range(2):
        window = TraceWindow(training.model, types=True)
        window.start()
        training.step()
        trace = window.stop()
    return trace


class Training:
    """Training of a program, with the changes that a plan's code makes."""

    def __init__(self, program: Program, code: str) -> None:
        torch.manual_seed(0)
        # A section begins with a comment that says where it belongs.
        parts = re.split(r"(?m)^# (After|Where|The step|Around).*\n", code)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        self.model = program.model()
        trained = (each for each in self.model.parameters() if each.requires_grad)
        self._names: dict[str, Any] = {
            "torch": torch,
            "model": self.model,
            "batch": program.batch(program.size),
            "loss_of": program.loss,
            "optimizer": program.optimizer(trained),
        }
        self._run(sections.get("After", ""))
        self._run(sections.get("Where", "").replace("lr=...", "lr=1e-4"))
        step = sections.get("The step", "")
        if not step:
            forward = sections.get("Around", "loss = ...")
            step = f"{forward}\nloss.backward()\noptimizer.step()\noptimizer.zero_grad()"
        part = "part" if "part in batch" in step else "batch"
        self.step: Callable[[], None] = lambda: self._run(
            step.replace("loss = ...", f"loss = loss_of(model, {part})")
        )

    def _run(self, code: str) -> None:
        exec(code, self._names)  # noqa: S102 - the plan's own lines, as a user would paste them


def changes_of(plan: FittingPlan) -> str:
    """Return the changes of a plan in a few words."""
    found = [f"{plan.parts} parts"] * (plan.parts > 1)
    found += [f"{len(plan.checkpointed)} modules checkpointed"] * bool(plan.checkpointed)
    found += ["autocast"] * plan.autocast
    found += [plan.optimizer.removeprefix("torch.optim.")] * bool(plan.optimizer)
    return ", ".join(found)


def summary(rows: list[Row]) -> str:
    errors = [abs(row.error) for row in rows if row.error is not None]
    enough = sum((row.measured or 0) <= row.plan.memory for row in rows)
    return "\n".join(
        [
            "| figure | value |",
            "| --- | ---: |",
            f"| kinds of training | {len({row.name for row in rows})} |",
            f"| plans, applied | {len(errors)} |",
            f"| plans that say that nothing fits | {len(rows) - len(errors)} |",
            f"| peak within 5 % of the plan's | {sum(each <= 0.05 for each in errors)} |",
            f"| peak within the asked memory | {enough - len(rows) + len(errors)} |",
            f"| largest difference | {max(errors):.1%} |",
        ]
    )


def table(rows: list[Row]) -> str:
    """Return one line for each training, with its plan that is farthest off."""
    lines = [
        "| training | plans | changes of the plan that is farthest off | plan MiB | measured MiB | error |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        applied = [row for row in rows if row.name == name and row.measured is not None]
        farthest = max(applied, key=lambda row: abs(row.error or 0.0), default=None)
        if farthest is not None:
            lines.append(
                f"| {name} | {len(applied)} | {changes_of(farthest.plan)} | {peaks_of(farthest)} |"
            )
    return "\n".join(lines)


def peaks_of(row: Row) -> str:
    measured, said = row.measured or 0, row.plan.steps[-1].peak
    return f"{said / _MIB:.2f} | {measured / _MIB:.2f} | {row.error:+.1%}"


def line(row: Row) -> str:
    asked = f"{row.name}, {row.plan.memory / row.whole:.0%}"
    if row.traced is None:
        return f"{asked}: nothing fits"
    return f"{asked}: {changes_of(row.plan)}, traced {row.traced / _MIB:.2f} | {peaks_of(row)}"


if __name__ == "__main__":
    main()
