"""Made-up runs with a planted truth: how memory goes, how the run ends, and what its journal records.

`planted_run` writes a journal of a run with the writer that a trainer uses. A seed chooses everything.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from memlog._internal.processes import RankPosition
from memlog.events import (
    Alert,
    Batch,
    ChildReading,
    Device,
    DeviceReading,
    End,
    Epoch,
    Evaluation,
    Event,
    Exit,
    Finding,
    Health,
    Inquiry,
    Loss,
    OutOfMemory,
    Run,
    Sample,
    Status,
)
from memlog.findings import sentence
from memlog.journal import RunDirectory
from support.journals import GIB, MadeRun, at
from support.planted_memory import HEALTHY, MIB, PATTERNS, RISING, Course, course
from support.planted_traces import TracedStep, keep, traced_steps, worst_of

Ending: TypeAlias = Literal[
    "finished", "failed", "stopped", "killed", "out of memory", "recovered", "running"
]
"""How a run ends.

- ``stopped``: a signal that the program handles, so that the run has an end event.
- ``killed``: nothing after the last step.
- ``out of memory``: a failed allocation ends the run.
- ``recovered``: an allocation fails, the program goes on, and the run finishes.
- ``running``: the run has not ended."""

ENDINGS: tuple[Ending, ...] = get_args(Ending)
_STATUS: dict[Ending, Status | Literal["running"]] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "killed",
    "killed": "killed",
    "out of memory": "failed",
    "recovered": "finished",
    "running": "running",
}
_STEPS = (8, 12, 25, 60, 60, 150, 150, 300, 700)
_RATES = (256, 1024, 1024, 4096, 8192)
"""KiB a step."""
_CAPACITY = 24 * GIB
_LIMIT = 32 * GIB
_FILES = 120 * MIB
"""Memory of the process that is pages of files."""


class Planted(NamedTuple):
    """Truth about a made-up run. Sizes are bytes."""

    seed: int
    ending: Ending
    status: str
    courses: dict[str, Course]
    """Memory by its name: ``host``, or a device's name."""
    steps: int
    first: int
    last: int
    every: int
    peaks: dict[str, int]
    """Highest memory by its kind: ``host.rss``, ``cuda0.allocated``."""
    traced: int
    """Number of traced steps."""
    worst: tuple[int, int, bool] | None
    """Step and peak of the worst traced step. The last value is True if the peak is exact."""
    holder: str | None
    """Title of the finding that the run's journal has; ``None``: it has none."""
    failed_on: str | None
    """``host`` or the device whose memory ran out."""
    name: str | None
    """Name of the run in the user's tracker."""

    @property
    def rising(self) -> list[str]:
        """Names of the memory that rises until the end."""
        return [name for name, one in self.courses.items() if one.rises]

    @property
    def is_healthy(self) -> bool:
        return all(one.rises is False for one in self.courses.values())

    @property
    def kind(self) -> str:
        """Group of the run in a table: ``rising``, ``healthy``, or ``unclear``."""
        if self.rising:
            return "rising"
        return "healthy" if self.is_healthy else "unclear"


class _Plan(NamedTuple):
    """Choices about one run."""

    ending: Ending
    courses: dict[str, Course]
    steps: int
    first: int
    every: int
    traced: list[TracedStep]
    has_workers: bool
    has_evaluations: bool
    grown: str | None
    """Name of the memory whose holder memlog has found; ``None``: none was found."""


def planted_run(
    root: Path, seed: int, *, ending: Ending | None = None
) -> tuple[RunDirectory, Planted]:
    """Write a run's journal, and return the truth about it."""
    rng = random.Random(seed)  # noqa: S311 - the same at every run
    plan = _plan(rng, seed, ending)
    made = MadeRun(root, f"seed{seed:04d}", alive=plan.ending == "running", segment_bytes=65_536)
    if rng.random() < 0.1:
        made.ranked(RankPosition(0, 2, f"job{seed}"))
    settings = {"every": str(plan.every)}
    made.write(Run(at(0), f"planted {seed}", None, (), settings))
    for name in plan.courses:
        if name != "host":
            made.write(Device(at(0), name, "NVIDIA L4", _CAPACITY))
    called = f"brave-cat-{seed}" if rng.random() < 0.5 else None
    if called:
        made.bound("mlflow", f"{seed:08x}", None, name=called)
    peaks = _write_steps(made, rng, plan)
    holder = _write_finding(made, plan)
    failed_on = _write_end(made, rng, plan, peaks)
    run = made.closed()
    for path in run.path.glob("helper-*"):
        # Late events are written by this process, whose number the file has.
        path.rename(path.with_name(path.name.replace(str(os.getpid()), "999999")))
    worst = worst_of(plan.traced) if plan.traced else None
    if worst is not None and worst.event.kept is not None:
        keep(run, worst)
    recorded = range(0, plan.steps, plan.every)
    return run, Planted(
        seed,
        plan.ending,
        _STATUS[plan.ending],
        plan.courses,
        _count(plan),
        plan.first,
        plan.first + recorded[-1],
        plan.every,
        peaks,
        len(plan.traced),
        worst and (worst.event.step or 0, worst.event.peak or 0, worst.event.exact),
        holder,
        failed_on,
        called,
    )


def _plan(rng: random.Random, seed: int, ending: Ending | None) -> _Plan:
    ending = ending or ENDINGS[seed % len(ENDINGS)]
    names = [*PATTERNS]
    steps, rate = rng.choice(_STEPS), rng.choice(_RATES) * 1024
    courses = {"host": course(rng, names[seed // len(ENDINGS) % len(names)], steps, rate)}
    for index in range(rng.choice((0, 0, 0, 1, 1, 2))):
        # Memory of the host and of a device rarely grow together.
        quiet = [*HEALTHY] if courses["host"].pattern in RISING else names
        courses[f"cuda{index}"] = course(rng, rng.choice(quiet), steps, rng.choice(_RATES) * 1024)
    first = rng.choice((0, 0, 0, 1, 1000))
    every = rng.choice((1, 1, 1, 1, 5, 10)) if steps >= 60 else 1
    traced: list[TracedStep] = []
    if steps >= 25 and rng.random() < 0.5:
        at_steps = sorted(rng.sample(range(0, steps - 1, every), min(4, steps // every - 1)))
        device = "cuda:0" if "cuda0" in courses and rng.random() < 0.7 else "cpu"
        told = rng.random() < 0.8
        traced = traced_steps(rng, [first + n for n in at_steps], device, told=told)
    rising = [name for name, one in courses.items() if one.rises]
    grown = rising[0] if rising and rng.random() < 0.6 else None
    return _Plan(
        ending,
        courses,
        steps,
        first,
        every,
        traced,
        rng.random() < 0.2,
        rng.random() < 0.3,
        grown,
    )


def _write_steps(made: MadeRun, rng: random.Random, plan: _Plan) -> dict[str, int]:
    """Write the events of all recorded steps, and return the peaks."""
    peaks: dict[str, int] = {}
    waiting = [*plan.traced]
    recorded = range(0, plan.steps, plan.every)
    host = plan.courses["host"]
    for index in recorded:
        step, rss = plan.first + index, host.levels[index] + _FILES
        if index in {recorded[-1], *recorded[:: max(len(recorded) // 8, 1)]}:
            made.sampled(_sample(step, rss, plan))
        inside = rng.choice((0, 0, 3)) * MIB if rng.random() < 0.3 else 0
        rose = rss + inside > peaks.get("host.rss", 0)
        peaks["host.rss"] = max(peaks.get("host.rss", 0), rss + inside)
        source: Literal["exact", "watermark"] = "exact" if rose else "watermark"
        devices = tuple(_devices(rng, plan, index, peaks))
        anon = host.levels[index]
        made.write(
            Batch(at(step / 10), step, rss, peaks["host.rss"], source, devices, anon, 8 * MIB),
            Loss(at(step / 10 + 0.01), step, 1 / (1 + index)),
        )
        while waiting and (waiting[0].event.step or 0) <= step:
            made.write(waiting.pop(0).event)
        if plan.has_evaluations and index % 40 == 20:
            made.write(Evaluation(at(step / 10 + 0.02), index // 40, 0.5, rss, ()))
            made.write(
                Epoch(at(step / 10 + 0.03), index // 40, step, rss, peaks["host.rss"], source)
            )
        if plan.ending == "recovered" and index == recorded[len(recorded) // 2]:
            device = "cuda0" if "cuda0" in plan.courses else "host"
            made.write(_failure(plan, step, device, peaks))
        suspected = (
            plan.ending in ("killed", "running") and index == recorded[len(recorded) * 3 // 4]
        )
        if suspected and plan.grown is not None:
            made.write(*_suspect(plan, step))
    return peaks


def _devices(
    rng: random.Random, plan: _Plan, index: int, peaks: dict[str, int]
) -> Iterator[DeviceReading]:
    for name, one in plan.courses.items():
        if name == "host":
            continue
        level = one.levels[index]
        peak = level + rng.randint(50, 60) * MIB
        kind = f"{name}.allocated"
        source: Literal["exact", "watermark"] = "exact"
        if peak <= peaks.get(kind, 0) and rng.random() < 0.3:
            peak, source = peaks[kind], "watermark"
        peaks[kind] = max(peaks.get(kind, 0), peak)
        yield DeviceReading(name, level, peaks[kind] + 100 * MIB, peak, source, 10 * MIB)


def _sample(step: int, rss: int, plan: _Plan) -> Sample:
    children = ()
    if plan.has_workers:
        children = tuple(
            ChildReading(f"DataLoader worker {n}", 900 + n, at(0), 150 * MIB, 40 * MIB)
            for n in range(2)
        )
    limit = _LIMIT if plan.first else None
    used = 40 * GIB  # the whole machine's, if there is no limit
    return Sample(
        at(step / 10 - 0.001),
        step,
        rss - _FILES // 2 + 150 * MIB * len(children),
        1 + len(children),
        48 * GIB - rss,
        rss + 200 * MIB if limit else used,
        limit,
        children=children,
        host_limit=limit or 64 * GIB,
    )


def _holder(plan: _Plan, step: int) -> Finding:
    name = plan.grown or "host"
    grown = plan.courses[name]
    on = "" if name == "host" else f" on {name}"
    return Finding(
        at(step / 10 + 0.04),
        step,
        "kept_tensors",
        f"`kept`, a list in `__main__` (train.py:9), gains one tensor{on} per step",
        "train.py:9",
        plan.first,
        grown.rate,
        (step + 200, step + 400),
        64 * GIB if name == "host" else _CAPACITY,
        ("4 of 4 steps added a tensor to `kept`.", "Each has 1 MiB."),
        "high",
        "Append `loss.item()` in place of the loss.",
    )


def _suspect(plan: _Plan, step: int) -> list[Event]:
    series = "host.anon" if plan.grown == "host" else f"{plan.grown}.allocated"
    found = _holder(plan, step)
    return [
        Inquiry(at(step / 10 + 0.03), step, series, searching=True),
        Inquiry(at(step / 10 + 0.04), step, series, searching=False, suspects=(found,)),
    ]


def _write_finding(made: MadeRun, plan: _Plan) -> str | None:
    """Write the finding that memlog publishes after a search. Return its title."""
    if plan.grown is None:
        return None
    step = plan.first + range(0, plan.steps, plan.every)[-1]
    found = _holder(plan, step)
    if plan.ending not in ("killed", "running"):
        alert = Alert(
            found.time_us,
            step,
            "warning",
            "memlog: kept_tensors",
            sentence(found),
            found.remedy or "",
        )
        made.write(found, alert)
    elif plan.ending == "running":
        return None  # the search has not confirmed it yet
    return found.title


def _write_end(made: MadeRun, rng: random.Random, plan: _Plan, peaks: dict[str, int]) -> str | None:
    """Write the run's end. Return the memory that ran out."""
    last, failed_on = plan.first + range(0, plan.steps, plan.every)[-1], None
    until = at((plan.first + plan.steps) / 10 + 1)
    if plan.ending == "out of memory":
        failed_on = rng.choice([*plan.courses])
        made.write(_failure(plan, last, failed_on, peaks))
    if plan.ending == "running":
        return None
    if plan.ending == "killed":
        made.write(Health(until - 900_000, last, 0.1, 1.0, {}, {}))
        if rng.random() < 0.7:
            made.sampled(Exit(until, None, "SIGKILL"))
        return None
    made.write(
        Health(until - 900_000, last, 0.1, 1.0, {}, {}, steps=plan.steps),
        End(until, "killed" if plan.ending == "stopped" else _ended(plan.ending)),
    )
    return failed_on


def _ended(ending: Ending) -> Status:
    return "finished" if ending in ("finished", "recovered") else "failed"


def _failure(plan: _Plan, last: int, device: str, peaks: dict[str, int]) -> OutOfMemory:
    """Return a failed allocation. The step that failed has raised the peak."""
    kind = "host.rss" if device == "host" else f"{device}.allocated"
    peaks[kind] = in_use = peaks[kind] + 90 * MIB
    limit = 64 * GIB if device == "host" else _CAPACITY
    return OutOfMemory(
        at(last / 10 + 0.05),
        last,
        device,
        requested=2 * GIB,
        free=GIB,
        limit=limit,
        limited_by="the machine's memory" if device == "host" else "the device's memory",
        allocated=in_use,
        reserved=None if device == "host" else in_use + 200 * MIB,
        layer="body.1",
        phase="forward",
        message="out of memory",
        machine=limit,
        resident=in_use if device == "host" else None,
    )


def _count(plan: _Plan) -> int:
    """Return the number of steps that a reader of the journal can know.

    The trainer's last health event has the number. Without it, the steps after the last recorded one are
    unknown.
    """
    if plan.ending in ("killed", "running"):
        return range(0, plan.steps, plan.every)[-1] + 1
    return plan.steps
