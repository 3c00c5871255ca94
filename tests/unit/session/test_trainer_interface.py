"""The part of a session that trainers' callbacks use: their own numbers of steps, runs of loggers."""

import os

import pytest
import torch
from support.events import recorded

import memlog
from memlog.events import Batch
from memlog.session.session import Session

pytestmark = pytest.mark.usefixtures("runs")


def steps_of(session: Session) -> list[int]:
    return [event.step for event in recorded(session, Batch)]


def optimizer_steps(count: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(count):
        weight.sum().backward()
        optimizer.step()


def test_the_current_session_is_the_one_that_records_in_this_process() -> None:
    assert memlog.current_session() is None
    session = memlog.init("local")
    assert memlog.current_session() is session
    if (child := os.fork()) == 0:
        os._exit(0 if memlog.current_session() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memlog.finish()
    assert memlog.current_session() is None
    memlog.init("local", enabled=False)
    assert memlog.current_session() is None


def test_a_trainers_number_that_jumps_ahead_is_the_sessions_step() -> None:
    session = memlog.init("local")
    session.claim_steps()
    assert [session.count_step(number)[0] for number in (1, 2, 5)] == [1, 2, 5]  # type: ignore[index]
    session.step(9)
    assert steps_of(session) == [1, 2, 5, 9]


def test_a_number_that_goes_back_is_counted_on() -> None:
    session = memlog.init("local")
    for number in (1, 2, 1, 2, 4):
        session.step(number)
    assert steps_of(session) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("number", ["3", -1, True, 1.0, 2**60])
def test_a_number_that_is_none_is_counted_on_and_reported(number: object) -> None:
    session = memlog.init("local")
    session.step()
    session.step(number)  # type: ignore[arg-type]
    assert steps_of(session) == [0, 1]
    assert session.health.dropped["step_number"] == 1


def test_claimed_steps_are_counted_once_also_after_steps_of_an_optimizer() -> None:
    session = memlog.init("local")
    optimizer_steps(2)
    session.claim_steps()
    for number in (1, 2):
        optimizer_steps(1)
        session.step(number)
    assert steps_of(session) == [0, 1, 2, 3]


def test_an_unknown_backend_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    session = memlog.init("local")
    for _ in range(2):
        session.join_run("no-such-tracker", "run-1")
    session.join_run("mlflow", "run-1")  # known, but not among those that `init` named
    (record,) = caplog.records
    assert "run run-1 is not joined: no backend is called 'no-such-tracker'" in record.getMessage()
    assert not session.health.faults


def test_a_loop_after_a_trainers_is_counted_again() -> None:
    session = memlog.init("local")
    optimizer_steps(2)
    session.claim_steps()
    optimizer_steps(1)
    session.count_step(1)
    session.release_steps()
    optimizer_steps(3)
    assert steps_of(session) == [0, 1, 2, 3, 4, 5]


def test_a_loop_that_calls_step_keeps_counting_by_hand_after_a_trainers() -> None:
    session = memlog.init("local")
    session.step()
    session.claim_steps()
    session.count_step()
    session.release_steps()
    optimizer_steps(1)
    session.step()
    assert steps_of(session) == [0, 1, 2]
