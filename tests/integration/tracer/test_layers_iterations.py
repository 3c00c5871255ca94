"""A traced step of a session covers the whole training iteration, however many optimizers it has."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner
from support.allocator import AllocatorTruth
from support.events import recorded, traces
from support.optimizer_loops import (
    ALONE,
    SEVERAL,
    Distilling,
    FiveToOne,
    InBackward,
    Lbfgs,
    Loop,
    Single,
    SparseAndDense,
    adam,
    network,
)

import memlog
from memlog.cli.main import cli
from memlog.events import Batch, Trace
from memlog.journal import RunDirectory, list_runs
from memlog.reports.summary import summarize
from memlog.reports.worst_step import WorstStep, read_worst_step
from memlog.torchside import internals
from memlog.trace.predict import advise
from memlog.tracer.schedule.budget import SPACING

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("runs")]


ITERATIONS = 40


class Outcome(NamedTuple):
    kept: WorstStep
    traces: list[Trace]
    state: int
    run: RunDirectory


def trained(kind: type[Loop], iterations: int = ITERATIONS, *, budget: float = 1.0) -> Outcome:
    torch.manual_seed(0)
    session = memlog.init("local", layers=True, budget=budget)
    loop = kind()
    for _ in range(iterations):
        loop.iterate()
    memlog.finish()
    assert not session.health.faults
    run = RunDirectory(session.directory)
    return Outcome(read_worst_step(run), traces(session), loop.state, run)


def needed(kind: type[Loop], iterations: int = 8) -> int:
    """Return the peak of a training, with its state, by the allocator's own events."""
    torch.manual_seed(0)
    with AllocatorTruth() as allocator:
        loop = kind()
        for _ in range(iterations):
            loop.iterate()
        del loop
    return allocator.result().peak


@pytest.mark.parametrize("kind", [*ALONE, *SEVERAL])
def test_the_step_that_is_kept_is_a_whole_iteration(kind: type[Loop]) -> None:
    outcome, truth = trained(kind), needed(kind)
    kept = outcome.kept.event
    assert kept.peak == pytest.approx(truth, rel=0.01)
    assert kept.step >= 2
    if kind is Lbfgs:  # its state is a history, that grows
        assert kept.at_peak["optimizer state"] > 0
    else:
        assert kept.at_peak["optimizer state"] == outcome.state
    sparse = kind is SparseAndDense  # where pointwise operations take more than is seen
    assert kept.exact is not sparse


@pytest.mark.parametrize("kind", [kind for kind in SEVERAL if kind is not FiveToOne])
def test_a_step_that_ends_before_the_other_optimizers_is_not_exact(kind: type[Loop]) -> None:
    """The first window closes after the first optimizer's step, because no other optimizer is known yet."""
    outcome = trained(kind, iterations=2)
    first, *_ = outcome.traces
    assert (first.step, first.exact) == (0, False)
    assert not outcome.kept.event.exact
    unseen = outcome.kept.trace.result.unseen
    assert any("not of a whole training iteration" in sentence for sentence in unseen)


@pytest.mark.parametrize("kind", ALONE)
def test_a_lone_optimizers_first_step_is_exact_unless_a_teacher_was_called_before_it(
    kind: type[Loop],
) -> None:
    outcome = trained(kind, iterations=2)
    has_teacher = issubclass(kind, Distilling)
    assert [(trace.step, trace.exact) for trace in outcome.traces] == [(0, not has_teacher)]
    unseen = outcome.kept.trace.result.unseen
    assert any("called before it" in sentence for sentence in unseen) is has_teacher


def test_a_run_that_ends_before_all_optimizers_were_seen_twice_says_so() -> None:
    """The generator steps only twice, the second time in the run's last step."""
    outcome = trained(FiveToOne, iterations=2)
    assert not outcome.kept.event.exact


def test_a_short_run_is_traced_twice_once_with_the_optimizers_state() -> None:
    """The run ends before there are enough steps without tracing for a third trace."""
    outcome = trained(Single, iterations=SPACING)
    assert [trace.step for trace in outcome.traces] == [0, 2]
    assert outcome.kept.event.step == 2
    assert advise(outcome.kept.trace).traced_peak == outcome.kept.event.peak


def test_the_worst_step_is_called_the_worst_of_the_traced_ones(runs: Path) -> None:
    outcome = trained(Single, iterations=40)
    count = len(outcome.traces)
    traced = summarize(outcome.run).traced
    assert (traced.steps, traced.worst_step) == (count, outcome.kept.event.step)
    assert traced.worst_peak_bytes == outcome.kept.event.peak
    assert traced.cost_ms
    assert traced.set_up_ms
    for command in ("show", "advise"):
        env = {**os.environ, "COLUMNS": "200"}
        output = CliRunner().invoke(cli, [command, "latest", "--dir", str(runs)], env=env).output
        assert f"the worst of {count} traced steps" in output


def test_optimizers_in_the_backward_pass_leave_no_mode_behind() -> None:
    """During the backward pass the stack of modes is a copy. A mode that is removed there comes back."""
    session = memlog.init("local", layers=True, budget=1.0)
    loop = InBackward()
    for _ in range(4):
        loop.iterate()
    assert not internals.mode_stack()
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == [0, 1, 2, 3]


def test_an_evaluation_is_no_part_of_the_step_that_follows(runs: Path) -> None:
    """memlog sees an evaluation before a traced step. Before the next traced step there is no evaluation."""
    session = memlog.init("local", layers=True, budget=1.0)
    loop = Single()
    for number in range(400):
        loop.iterate()
        if number == 1:
            with torch.no_grad():
                loop.net(torch.ones(4096, 16))
    memlog.finish()
    first, behind, *later = traces(session)
    assert (behind.step, behind.exact) == (2, False)
    assert later
    assert all(event.exact for event in (first, *later))
    (run,) = list_runs(runs)
    kept = read_worst_step(run).event
    assert kept.exact
    assert kept.peak == later[0].peak


class MeanTeacher(Distilling):
    """Student and the mean of its weights, which requires gradients although nothing trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net)


class GeneratorAlone(Loop):
    """Adversarial training in which the critic's optimizer has not stepped yet."""

    def __init__(self) -> None:
        self.net, self.critic = network(16, 64, 16), network(16, 64, 1)
        self.optimizers = (adam(self.net), adam(self.critic))

    def iterate(self) -> None:
        loss = self.critic(self.net(torch.ones(64, 16))).mean()
        self.update(loss, self.optimizers[0])


@pytest.mark.parametrize(("kind", "name"), [(MeanTeacher, "0"), (GeneratorAlone, "(Sequential).0")])
def test_a_layer_has_one_name_in_all_traces_of_a_run(kind: type[Loop], name: str) -> None:
    session = memlog.init("local", layers=True)
    loop = kind()
    for _ in range(4):
        session.snapshot()
        loop.iterate()
    memlog.finish()
    found = traces(session)
    assert len(found) == 4
    for trace in found:
        paths = {layer.path for layer in trace.layers}
        assert paths & {"0", "(Sequential).0"} == {name}


def test_what_another_thread_calls_begins_no_trace() -> None:
    """The other thread prepares the data with a network of its own."""
    session = memlog.init("local", layers=True, budget=1.0)
    loop, encoder = Distilling(), network(16, 64, 16)

    def prepare() -> None:
        with torch.no_grad():
            encoder(torch.ones(8, 16))

    for _ in range(30):
        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join()
        loop.iterate()
    memlog.finish()
    assert "trace_skipped" not in session.health.dropped
    found = traces(session)
    assert [event.step for event in found][:2] == [0, 2]
    assert found[1].peak == pytest.approx(needed(Distilling), rel=0.01)


def test_new_optimizers_are_traced_with_the_kept_ones_state() -> None:
    session = memlog.init("local", layers=True, budget=1.0)
    net, kept = network(16, 64, 8), []
    for number in range(400):
        if number % 10 == 0:
            kept.append(adam(net))
        kept[-1].zero_grad()
        net(torch.ones(8, 16)).square().mean().backward()
        kept[-1].step()
    memlog.finish()
    last = traces(session)[-1]
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert last.exact
    assert last.at_peak["optimizer state"] >= 2 * weights * 4


def test_a_step_reported_by_hand_is_traced_whole() -> None:
    """The loop uses no PyTorch optimizer."""
    net = network(16, 64, 8)
    session = memlog.init("local", layers=True, budget=1.0)
    for _ in range(5):
        net(torch.ones(8, 16)).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        session.step()
    memlog.finish()
    assert [(event.step, event.exact) for event in traces(session)] == [(0, True), (2, True)]
