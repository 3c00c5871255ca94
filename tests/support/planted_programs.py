"""Real short trainings with a planted truth: what holds memory, when it keeps it, and how the program ends.

A seed chooses everything. Each program is a script like a user's, in a process of its own.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from memlog.events import Status
from memlog.journal import RunDirectory, list_runs
from memlog.journal.delivery_state import HelperLock
from memlog.ranks.registration import ranks_of
from support import child
from support.mlflow_server import sqlite_store
from support.surfaces import Said, Truth, against, among_themselves, described, plain, statements

Keeps: TypeAlias = Literal["each step", "every tenth step", "the second half"]
Ends: TypeAlias = Literal[
    "the script ends",
    "finish",
    "an error",
    "SIGKILL",
    "SIGTERM",
    "os._exit",
    "out of memory",
    "Ctrl-C",
]

KIB = 1024
_KEPT_BY: dict[str, tuple[str, str, str]] = {
    "nothing": ("", "pass", ""),
    "a list": ("kept = []", "kept.append(torch.ones({size} // 4))", "kept"),
    "a dict": ("cache = {{}}", "cache[step] = torch.ones({size} // 4)", "cache"),
    "an attribute": (
        "class Trainer:\n    def __init__(self):\n        self.history = []\n\ntrainer = Trainer()",
        "trainer.history.append(torch.ones({size} // 4))",
        "history",
    ),
    "a list of losses with graphs": (
        "losses = []",
        "losses.append((weight * torch.ones({size} // 4)).square().mean())",
        "losses",
    ),
    "a growing tensor": (
        "memory = torch.ones(0)",
        "memory = torch.cat([memory, torch.ones({size} // 4)])",
        "memory",
    ),
}
"""For each holder: its definition, the statement that keeps bytes, and its name in the program."""

_ALSO_SAID = {"a growing tensor": ("is larger in each step",)}
"""Other texts that name the holder, though not by its variable."""
HOLDERS = tuple(_KEPT_BY)
KEEPS: tuple[Keeps, ...] = ("each step", "each step", "every tenth step", "the second half")
_CONDITIONS: dict[Keeps, str] = {
    "each step": "True",
    "every tenth step": "step % 10 == 9",
    "the second half": "step >= {steps} // 2",
}
_ENDS: dict[Ends, tuple[str, Status, tuple[str, ...]]] = {
    "the script ends": ("pass", "finished", ()),
    "finish": ("memlog.finish()", "finished", ()),
    "an error": ('raise ValueError("made up")', "failed", ()),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "killed", ("Ended unexpectedly",)),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "killed", ("Ended unexpectedly",)),
    "os._exit": ("os._exit(0)", "killed", ("Ended unexpectedly",)),
    "out of memory": ("torch.empty(2**46)", "failed", ("Out of memory",)),
    "Ctrl-C": ("signal.raise_signal(signal.SIGINT)", "killed", ("Interrupted",)),
}
"""For each end: the statement that makes it, the run's status, and the beginning of the first line."""

ENDS: tuple[Ends, ...] = tuple(_ENDS)
_DEATHS: tuple[Ends, ...] = ("SIGKILL", "SIGTERM", "os._exit")

_SCRIPT = """
import os, signal, time, torch, memlog{imports}
from torch import nn
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
torch.manual_seed({seed})
{tracker}
ranks = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
if ranks > 1:
    store = "file://" + os.path.abspath("ranks")  # without a port, which another program may take
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks)
{definition}
weight = nn.Parameter(torch.ones(()))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.01)
memlog.init({arguments})
for step in range({steps}):
    loss = model(torch.randn(8, 64)).square().mean() * weight
    optimizer.zero_grad()
    loss.backward()
    if ranks > 1:
        torch.distributed.all_reduce(weight.grad)
    optimizer.step()
    if {condition}:
        {keep}
if rank == ranks - 1:
    {end}
if ranks > 1:
    torch.distributed.barrier()
"""


_ONE_READER = threading.Lock()
"""The commands are read through one standard output."""


class Program(NamedTuple):
    """Choices about a program."""

    seed: int
    holder: str
    keeps: Keeps
    ends: Ends
    tracker: Literal["local", "mlflow", "a run of the user's in MLflow"]
    traced: bool
    steps: int
    rate: int
    """Bytes that are kept at a step, on average over the steps in which memory grows."""
    ranks: int = 1
    """Number of ranks that train together. The last one ends as ``ends`` says."""

    @property
    def grows(self) -> bool:
        return self.holder != "nothing"

    @property
    def name(self) -> str:
        """Name of the holder in the program."""
        return _KEPT_BY[self.holder][2]

    @property
    def kept(self) -> int:
        """Bytes that are kept in all."""
        return self.rate * (self.steps // 2 if self.keeps == "the second half" else self.steps)

    def script(self) -> str:
        definition, keep, _ = _KEPT_BY[self.holder]
        size = self.rate * (10 if self.keeps == "every tenth step" else 1)
        users = self.tracker == "a run of the user's in MLflow"
        named = "" if users else repr("local" if self.tracker == "local" else "mlflow")
        traced = "model=model, layers=True" if self.traced else ""
        return _SCRIPT.format(
            imports="" if self.tracker == "local" else ", mlflow",
            seed=self.seed,
            tracker=f'mlflow.start_run(run_name="{self.title}")' if users else "",
            definition=definition.format(size=size),
            arguments=", ".join(part for part in (named, traced) if part),
            steps=self.steps,
            condition=_CONDITIONS[self.keeps].format(steps=self.steps),
            keep=keep.format(size=size),
            end=_ENDS[self.ends][0],
        )

    @property
    def title(self) -> str:
        return f"program-{self.seed}"

    def truth(self) -> Truth:
        _, status, begins = _ENDS[self.ends]
        facts: dict[str, object] = {
            "status": status,
            "steps": self.steps,
            "last step": self.steps - 1,
        }
        if self.tracker == "a run of the user's in MLflow":
            facts["name"] = self.title
        if not self.traced:
            facts["traced steps"] = 0
        return Truth(
            facts,
            rising=("host",) if self.grows else (),
            is_healthy=not self.grows,
            suspects=(self.name, *_ALSO_SAID.get(self.holder, ())) if self.name else (),
            ends_with=begins,
            has_report=status == "killed" and self.ends != "Ctrl-C",
            has_limit=True,
        )


class Outcome(NamedTuple):
    """Result of one program."""

    program: Program
    verdict: str
    contradictions: list[str]
    seconds: float

    @property
    def names_the_cause(self) -> bool:
        return self.program.name in self.verdict and "Memory grows by" in self.verdict


def planted_program(seed: int) -> Program:
    rng = random.Random(seed)  # noqa: S311 - the same at every run
    holder = HOLDERS[seed % len(HOLDERS)]
    ends = ENDS[(seed + seed // len(HOLDERS)) % len(ENDS)]  # all pairs in 48 seeds
    keeps = rng.choice(KEEPS)
    rate = rng.choice((512, 1024, 2048, 4096)) * KIB
    steps = rng.choice((60, 120, 200))
    if rate * steps < 60 * KIB * KIB:
        rate = 1024 * KIB
    tracker = rng.choices(("local", "mlflow", "a run of the user's in MLflow"), (4, 1, 1))[0]
    return Program(seed, holder, keeps, ends, tracker, rng.random() < 0.3, steps, rate)


def death(seed: int) -> Program:
    """Return a program that keeps tensors in a list, and is killed at a random step from 30 to 400."""
    rng = random.Random(seed)  # noqa: S311 - the same at every run
    steps, rate = rng.randint(30, 400), rng.choice((2, 4, 8)) * KIB * KIB
    rate = min(rate, 1024 * KIB * KIB // steps)
    ends = rng.choice(_DEATHS)
    return Program(seed, "a list", "each step", ends, "local", traced=False, steps=steps, rate=rate)


def of_ranks(seed: int) -> Program:
    """Return a program of two ranks. It ends well, or rank 1 runs out of memory or is killed."""
    rng = random.Random(seed)  # noqa: S311 - the same at every run
    ends: tuple[Ends, ...] = ("the script ends", "out of memory", "SIGKILL")
    holder = ("a list", "nothing")[seed // len(ends) % 2]
    steps = rng.choice((60, 120))
    return Program(
        seed,
        holder,
        "each step",
        ends[seed % len(ends)],
        "local",
        False,
        steps,
        2048 * KIB,
        ranks=2,
    )


def repeated(rate_kib: int, steps: int) -> Program:
    """Return a program that is run again and again."""
    return Program(
        rate_kib,
        "a list",
        "each step",
        "finish",
        "local",
        traced=False,
        steps=steps,
        rate=rate_kib * KIB,
    )


def outcome_of(program: Program, folder: Path) -> Outcome:
    """Run a program, and compare what all surfaces say about it with the truth and with each other."""
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    if program.ranks > 1:
        verdict, wrong = _of_ranks(program, folder)
        return Outcome(program, verdict, wrong, time.monotonic() - begun)
    environment = {"OMP_NUM_THREADS": "1"}
    if program.tracker != "local":
        environment["MLFLOW_TRACKING_URI"] = sqlite_store(folder)
    process = child.start(program.script(), folder, **environment)
    _, printed = process.communicate(timeout=240)
    (run,) = list_runs(folder / "memlog_runs")
    _wait_for_helper(run)
    with _ONE_READER:
        said = [*statements(run, delivered=False)]
    if program.ends not in _DEATHS:
        said += _printed(printed)
    if program.tracker != "local":
        said += [*_in_mlflow(environment["MLFLOW_TRACKING_URI"])]
    verdict = next(str(each.value) for each in said if each.fact == "verdict")
    wrong = [*against(program.truth(), said), *among_themselves(said)]
    return Outcome(program, verdict, wrong, time.monotonic() - begun)


def _of_ranks(program: Program, folder: Path) -> tuple[str, list[str]]:
    """Run a program in several ranks, and return the first line about the run that they share.

    Each rank's run must tell the truth, and the shared run must name the rank that failed.
    """
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(program.ranks)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(program.ranks)]
    started = [child.start(program.script(), folder, **shared, **each) for each in own]
    printed = [process.communicate(timeout=240)[1] for process in started]
    runs = ranks_of(list_runs(folder / "memlog_runs")[0])
    for run in runs.values():
        _wait_for_helper(run)
    with _ONE_READER:
        said = {rank: [*statements(run, delivered=False)] for rank, run in runs.items()}
    said[0] += _printed(printed[0])
    first, last = said[0], said[program.ranks - 1]
    truth = program.truth()
    failed = truth.facts["status"] != "finished"
    named = f"Rank {program.ranks - 1} "
    begins = (*truth.ends_with, named) if failed else ()
    wrong = [*against(truth._replace(ends_with=begins, has_report=False), last)]
    for each in said.values():
        wrong += among_themselves(each)
    verdict = next(str(each.value) for each in first if each.fact == "verdict")
    if failed and not verdict.startswith(named):
        wrong.append(f"the shared run does not name the rank that failed: {verdict}")
    return verdict, wrong


def _wait_for_helper(run: RunDirectory) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with HelperLock(run) as is_free:
            if is_free:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the helper process of {run.path} has not ended")


_LINK = re.compile(r"memlog: (run \w+|\w+ run .*): `?[\w/]")
"""Beginning of a line that tells where a run is."""


def _printed(printed: str) -> Iterator[Said]:
    """Yield the verdict that memlog prints as a program ends."""
    lines = [line for line in printed.splitlines() if line.startswith("memlog: ")]
    ends = [number for number, line in enumerate(lines) if _LINK.match(line)]
    told = lines[: ends[0]] if ends else lines
    if told and told[-1].startswith("memlog: what to do: "):
        told.pop()
    yield Said("end line", "verdict", plain(told[-1].removeprefix("memlog: ")) if told else "")


def _in_mlflow(uri: str) -> Iterator[Said]:
    """Yield what MLflow's run has: its status, its description, and its points."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    for found in client.search_runs(experiments):
        text = found.data.tags.get("mlflow.note.content", "")
        if text.startswith("**"):
            for fact, value in described(text):
                yield Said("MLflow's description", fact, value)
        status = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}
        if found.info.status in status:
            yield Said("MLflow", "_status", status[found.info.status])
        steps = [
            row.step for row in client.get_metric_history(found.info.run_id, "memory/host/rss_mib")
        ]
        if steps:
            yield Said("MLflow", "last step", max(steps))
