"""HYCO on memlog: every documented command, and the lines that the documents show."""

import functools
import importlib.util
import os
import pty
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from support import hyco, pages
from support.events import events_in, runs_in
from support.mlflow_server import sqlite_store

from memlog.events import Batch, Epoch, Evaluation, Loss, Run
from memlog.journal import RunDirectory

EventT = TypeVar("EventT")

pytestmark = [pytest.mark.integration, pytest.mark.slow, hyco.needs_hyco]

SYNTHETIC = "python run.py --config-name=burgers_experiment trainer=synthetic_with_memory"
BURGERS = "python run.py --config-name=burgers_physical_experiment trainer=physical_with_memory"
HEAT = "python run.py --config-name=heat_physical_experiment trainer=physical_with_memory"
VELOCITY = "python run.py --config-name=burgers_velocity_experiment trainer=physical_with_memory"
NAMES = ("burgers_inverse", "heat_inverse")

MB = r"\d+\.\d MB"
ANNOUNCED = ["Memory monitoring enabled \\(verbose for first 5 batches\\)", ""]
BATCH = rf"(GPU {MB}, )?CPU {MB}, loss=\d+\.\d{{6}}"
PEAK = rf"{MB}( \((watermark|sampled)\))?"
EPOCH_END = rf"  Epoch end: (GPU {MB} allocated, {MB} reserved|CPU {MB}), peak {PEAK}"
USAGE = rf"CPU: {MB} \| (GPU Allocated: {MB} \| GPU Reserved: {MB}|GPU: Not available)"
LOSS = r"\((-?\d+\.\d{3}|[\d.e+-]+)\) along batch\u1d47"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder: its simulations are made by the first command that needs them."""
    copy = hyco.copy_to(tmp_path_factory.mktemp("examples"))
    if importlib.util.find_spec("mlflow"):
        sqlite_store(copy)
    return copy


class Outcome(NamedTuple):
    """Output of a command, and the runs that the command made."""

    lines: list[str]
    runs: list[RunDirectory]


@functools.cache
def outcome(folder: Path, command: str) -> Outcome:
    before = {run.id for run in runs_in(folder)}
    lines = hyco.run(folder, command)
    return Outcome(lines, [run for run in runs_in(folder) if run.id not in before])


def python(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a program that may fail."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=hyco.environment(**variables),
        capture_output=True,
        encoding="utf-8",
        timeout=hyco.LIMIT_S,
        check=False,
    )


def printed(folder: Path, command: str) -> list[str]:
    """Return a command's printed lines without the progress line."""
    return [line for line in outcome(folder, command).lines if "L-BFGS-B: " not in line]


def events(folder: Path, command: str, kind: type[EventT]) -> list[EventT]:
    [run] = outcome(folder, command).runs
    return events_in(run, kind)


def matches(lines: list[str], patterns: list[str]) -> bool:
    assert len(lines) == len(patterns), lines
    wrong = [
        pair for pair in zip(lines, patterns, strict=True) if not re.fullmatch(pair[1], pair[0])
    ]
    return wrong == []


def epochs(number: int, batches: int) -> list[str]:
    shown = [f"  Batch {index}: {BATCH}" for index in range(batches)]
    return [
        line
        for epoch in range(1, number + 1)
        for line in (*shown, EPOCH_END, rf"Epoch {epoch}/{number}: mean loss \d+\.\d{{6}}")
    ]


def optimization(evaluations: int) -> list[str]:
    shown = [
        line
        for index in range(evaluations)
        for line in (
            f"  Loss evaluation {index}: {USAGE}",
            f"    Iteration {index + 1}: loss={LOSS}",
        )
    ]
    return [
        f"After loading ground truth data: {USAGE}",
        *shown,
        f"After optimization: {USAGE}",
        f"  Peak (GPU|CPU) memory during optimization: {PEAK}",
    ]


def recovered(line: str) -> float:
    return float(line.split(": ")[1].split(" ", maxsplit=1)[0])


@pytest.mark.parametrize(
    "command",
    [
        SYNTHETIC,
        "python run.py --config-name=burgers_experiment trainer_params.enable_memory_monitoring=true",
    ],
)
@pytest.mark.seed(1, 17, 54, 55, 57, 60, 61, 71, 75, 80, 81, 85, 88, 96, 97, 156, 157)
def test_the_synthetic_trainer_prints_its_first_batches_and_every_epochs_peak(
    command: str, folder: Path
) -> None:
    lines = printed(folder, command)
    assert matches(lines, [*ANNOUNCED, *epochs(2, 5)])
    assert len(events(folder, command, Batch)) == len(events(folder, command, Loss)) == 2 * 11
    assert [event.epoch for event in events(folder, command, Epoch)] == [0, 1]
    means = [float(line.split()[-1]) for line in lines if "mean loss" in line]
    assert means[1] < means[0] / 2


@pytest.mark.seed(74, 124, 131)
def test_the_quick_test_with_gradient_accumulation_learns_as_the_large_batch_does(
    folder: Path,
) -> None:
    command = "python run.py --config-name=burgers_quick_test trainer=synthetic_with_memory"
    small = (
        "trainer_params.batch_size=4 trainer_params.gradient_accumulation_steps=2 "
        "trainer_params.use_amp=true trainer_params.use_checkpointing=true"
    )
    one, two = printed(folder, command), printed(folder, f"{command} {small}")
    assert matches(one, [*ANNOUNCED, *epochs(2, 3)])
    assert matches(two, [*ANNOUNCED, *epochs(2, 5)])
    means = [float(lines[-1].split()[-1]) for lines in (one, two)]
    assert means[0] == pytest.approx(means[1], rel=0.05)


@pytest.mark.parametrize(("command", "true"), [(BURGERS, 0.1), (HEAT, 1.0)])
@pytest.mark.seed(1, 41, 56, 58, 62, 63, 70, 75, 80, 86, 87, 90, 91, 93, 94, 96, 97, 98, 161)
def test_the_physical_trainer_prints_evaluations_and_recovers_the_coefficient(
    command: str, true: float, folder: Path
) -> None:
    *lines, verdict = printed(folder, command)
    assert matches(lines, [*ANNOUNCED, *optimization(5)])
    assert recovered(verdict) == pytest.approx(true, rel=0.01)
    evaluations = events(folder, command, Evaluation)
    losses = [event.value or 0 for event in evaluations]
    assert losses[-1] < losses[0] / 100
    iterations = [event.iteration for event in evaluations]
    assert iterations[0] == 0
    assert 1 < (iterations[-1] or 0) < len(evaluations)


def test_the_physical_trainer_recovers_an_initial_velocity(folder: Path) -> None:
    *_, verdict = printed(folder, VELOCITY)
    assert verdict.startswith("Recovered initial velocity: largest error 0.")
    evaluations = events(folder, VELOCITY, Evaluation)
    assert (evaluations[-1].value or 0) < (evaluations[0].value or 0) / 1000


@pytest.mark.seed(64, 92, 99, 100)
def test_the_physical_quick_test_takes_two_iterations_and_several_simulations(folder: Path) -> None:
    command = "python run.py --config-name=burgers_physical_quick_test trainer=physical_with_memory"
    two = f"{command} trainer_params.memory_monitor_batches=2"
    *lines, verdict = printed(folder, two)
    announced = ["Memory monitoring enabled \\(verbose for first 2 batches\\)", ""]
    assert matches(lines, [*announced, *optimization(2)])
    assert verdict.startswith("Recovered nu: 0.1")
    assert events(folder, two, Evaluation)[-1].iteration == 2
    *_, verdict = printed(folder, f"{command} trainer_params.train_sim=[0,1]")
    assert verdict == "Recovered nu: 0.1000, 0.1000 (true 0.1)"


@pytest.mark.parametrize("name", ["burgers_quick_test", "burgers_physical_quick_test"])
@pytest.mark.seed(77, 83, 84, 89, 100, 132, 146)
def test_by_default_monitoring_is_off_and_leaves_no_trace(name: str, folder: Path) -> None:
    lines, runs = outcome(folder, f"python run.py --config-name={name}")
    assert all(re.match(r"Epoch \d/\d: mean loss|Recovered nu", line) for line in lines)
    assert runs == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "trainer=physical_with_memory",
            "the experiment is synthetic, and the trainer is not: trainer=synthetic or synthetic_with_memory",
        ),
        (
            "data.n_frames=2",
            "data.n_frames=2 has no window of trainer_params.num_predict_steps=4 frames after the first: "
            "use at least 5 frames",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line(overrides: str, line: str, folder: Path) -> None:
    command = f"run.py --config-name=burgers_experiment {overrides}"
    done = python(folder, *command.split())
    assert done.returncode == 1
    assert done.stderr == f"This configuration can't be trained: {line}\n"


def test_each_group_of_added_up_gradients_is_a_mean_also_the_last(folder: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(hyco.EXAMPLES)!r})
import torch
from types import SimpleNamespace
from hyco.synthetic import SyntheticTrainer

for every in (1, 2, 4):
    trainer = SyntheticTrainer.__new__(SyntheticTrainer)
    trainer.params = SimpleNamespace(gradient_accumulation_steps=every)
    trainer.loader = range(5)
    trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    weight = torch.nn.Parameter(torch.zeros(()))
    trainer.optimizer = torch.optim.SGD([weight], lr=1.0)
    taken = []
    for batch_idx in range(5):
        before = weight.item()
        trainer._learn(weight * 1.0, batch_idx)
        taken.append(before - weight.item())
    print(*taken)
"""
    done = python(folder, "-c", script)
    assert done.returncode == 0, done.stderr
    for every, line in zip((1, 2, 4), done.stdout.splitlines(), strict=True):
        steps = [float(step) for step in line.split()]
        assert [step for step in steps if step] == pytest.approx([1.0] * -(-5 // every))


def metrics(folder: Path, name: str) -> list[tuple[int, float]]:
    """Points of one metric of the newest run in MLflow's database."""
    query = """
        SELECT step, value FROM metrics WHERE key = ? AND run_uuid =
            (SELECT run_uuid FROM runs ORDER BY start_time DESC LIMIT 1) ORDER BY step
    """
    with closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)) as connection:
        return [(int(step), float(value)) for step, value in connection.execute(query, (name,))]


@pytest.mark.seed(136, 162, 167)
def test_with_mlflow_as_backend_the_metrics_are_in_mlflow(folder: Path) -> None:
    pytest.importorskip("mlflow")
    [run] = outcome(folder, f"{HEAT} memlog.backend=mlflow").runs
    hyco.run(folder, f"python -m memlog sync {run.id}")  # on a slow machine there is more to come
    evaluations = events_in(run, Evaluation)
    expected = [(event.evaluation, float(event.iteration or 0)) for event in evaluations]
    assert metrics(folder, "memory/eval/iteration") == expected
    losses = [value for _, value in metrics(folder, "memory/eval/loss")]
    assert losses == pytest.approx([event.value for event in evaluations])


def test_multirun_gives_every_job_a_run_of_its_own(folder: Path) -> None:
    name = "python run.py -m --config-name=burgers_quick_test trainer=synthetic_with_memory"
    runs = outcome(folder, f"{name} trainer_params.batch_size=4,8").runs
    assert [len(events_in(run, Batch)) for run in runs] == [10, 6]
    assert [event.step for event in events_in(runs[1], Batch)] == list(range(6))
    assert [events_in(run, Run)[0].name for run in runs] == ["burgers_quick"] * 2


@pytest.mark.seed(95, 167)
def test_both_counters_are_shown_while_the_optimiser_runs(folder: Path) -> None:
    """In a terminal: a line that is rewritten, with more evaluations than iterations at the end."""
    terminal, own = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *f"{VELOCITY} trainer_params.memory_monitor_batches=0".split()[1:]],
        cwd=folder,
        env=hyco.environment(),
        stdout=subprocess.PIPE,
        stderr=own,
    )
    os.close(own)
    try:
        process.communicate(timeout=hyco.LIMIT_S)
        seen = os.read(terminal, 1 << 16).decode()
    finally:
        process.kill()
        os.close(terminal)
    counts = re.findall(r"L-BFGS-B: (\d+) evaluations?, (\d+) iterations?, loss=", seen)
    assert len(counts) > 1
    assert seen.count("\x1b[2K") == len(counts)
    evaluations, iterations = map(int, counts[-1])
    assert evaluations > iterations == 20


@pytest.mark.seed(169)
def test_the_physical_models_are_compared(folder: Path) -> None:
    names = " ".join(run.id for command in (BURGERS, HEAT) for run in outcome(folder, command).runs)
    compare = f"python -m memlog compare {names}"
    lines = hyco.run(folder, f"{compare} --fail-if host.rss>+100%")
    assert lines[0].split() == [f for n in zip(names.split(), NAMES, strict=True) for f in n] + [
        "change"
    ]
    # The helper samples these about once a second, which a short run may not last; the second in a container.
    optional = {"host.tree", "host.cgroup"}
    assert lines[1].split() == ["status", "finished", "finished"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    figures = {name: row for name, row in rows.items() if name not in optional}
    assert set(figures) == {"host.rss", "evaluation.time"}
    for row in figures.values():
        shown = r"[\d.,]+ (MiB|ms) [\d.,]+ (MiB|ms) [+-][\d.,]+ %"
        assert re.fullmatch(shown, " ".join(row)), row
    with pytest.raises(AssertionError, match=r"the gate 'host.rss>-99%' failed: run \w{8} has"):
        hyco.run(folder, f"{compare} --fail-if host.rss>-99%")
    [shown] = [code for code in consoles() if code.startswith("$ memlog compare")]
    assert {line.split()[0] for line in shown.splitlines()[3:]} - optional == set(figures)


def consoles() -> list[str]:
    return [block.code for block in pages.blocks("project/hyco.md") if block.language == "console"]


def documented() -> list[tuple[str, str]]:
    """Commands of docs/project/hyco.md whose output the page shows, each with this output."""
    parted = [code.removeprefix("$ ").partition("\n") for code in consoles()]
    return [(command, shown) for command, _, shown in parted if command.startswith("python run.py")]


@pytest.mark.parametrize(("command", "shown"), documented())
def test_the_documentation_shows_what_is_printed(command: str, shown: str, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the page shows the lines of a machine without a GPU")
    assert pages.masked("\n".join(outcome(folder, command).lines)) == pages.masked(shown)


@pytest.mark.seed(170)
def test_the_documentations_scopes_around_field_operations_run_and_print_that(
    tmp_path: Path,
) -> None:
    [block] = [block for block in pages.blocks("project/hyco.md") if block.language == "python"]
    done = python(tmp_path, "-c", block.code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert pages.unspaced(done.stdout) == pages.unspaced(block.shown or "")
