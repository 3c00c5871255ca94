"""``track_iterations``: an optimiser's iterations and evaluations are two counters."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from support.events import recorded

import memlog
from memlog.console import ProgressLine
from memlog.events import Evaluation

pytestmark = pytest.mark.usefixtures("nothing_goes_wrong_inside")


def rosenbrock(x: Any) -> tuple[Any, Any]:
    return scipy.optimize.rosen(x), scipy.optimize.rosen_der(x)


def solve(minimize: Any = None, **arguments: Any) -> Any:
    watched = memlog.watch_loss(rosenbrock, verbose_evaluations=0)
    find = minimize or scipy.optimize.minimize
    return find(watched, np.zeros(2), jac=True, method="L-BFGS-B", **arguments)


@pytest.mark.parametrize("through_the_module", [True, False])
@pytest.mark.seed(95, 167)
def test_scipys_iterations_are_counted_once(
    through_the_module: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from scipy.optimize import minimize

    with (
        memlog.init("local", dir=tmp_path, config={"quiet": True}) as session,
        memlog.track_iterations("L-BFGS-B") as iterations,
    ):
        found = solve() if through_the_module else solve(minimize, callback=iterations)
    assert (iterations.evaluations, iterations.iterations) == (found.nfev, found.nit)
    assert found.nfev > found.nit > 5
    events = recorded(session, Evaluation)
    counted = [event.iteration for event in events]
    assert counted[0] == 0
    assert counted == sorted(counted)  # type: ignore[type-var]
    assert set(counted) == set(range(found.nit + 1))
    [line] = capsys.readouterr().err.splitlines()
    loss = f"{events[-1].value:.6f}"
    assert line == f"  L-BFGS-B: {found.nfev} evaluations, {found.nit} iterations, loss={loss}"


def test_the_users_callback_is_called_as_before_and_everything_is_put_back() -> None:
    before = scipy.optimize.minimize
    seen: list[Any] = []

    def callback(intermediate_result: Any) -> None:
        seen.append(intermediate_result.fun)
        if len(seen) == 3:
            raise StopIteration

    with memlog.track_iterations(print_output=False) as iterations:
        solve(callback=callback)
    assert len(seen) == iterations.iterations == 3
    assert all(isinstance(fun, float) for fun in seen)
    assert scipy.optimize.minimize is before


def test_one_after_the_other_adds_and_an_error_ends_the_count() -> None:
    iterations = memlog.track_iterations(print_output=False)
    with iterations:
        several = [solve().nit, solve().nit]
    assert iterations.iterations == sum(several)
    before = scipy.optimize.minimize
    with pytest.raises(ZeroDivisionError), memlog.track_iterations(print_output=False):
        scipy.optimize.minimize(lambda _: 1 / 0, [0.0])
    assert scipy.optimize.minimize is before


def test_outside_of_a_block_evaluations_have_no_iteration(tmp_path: Path) -> None:
    with memlog.init("local", dir=tmp_path) as session:
        solve()
    events = recorded(session, Evaluation)
    assert {event.iteration for event in events} == {None}


def test_calling_the_tracker_counts_an_iteration() -> None:
    watched = memlog.watch_loss(lambda: 1.0, verbose_evaluations=0)
    with memlog.track_iterations(print_output=False) as iterations:
        for _ in range(3):
            watched()
            watched()
            iterations()
    assert (iterations.evaluations, iterations.iterations) == (6, 3)


def test_where_monitoring_is_off_it_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = scipy.optimize.minimize
    with memlog.init("local", dir=tmp_path, enabled=False), memlog.track_iterations() as iterations:
        assert scipy.optimize.minimize is before
        solve(callback=iterations)
    assert iterations.evaluations == 0
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_line_is_rewritten_while_the_optimiser_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("memlog.console._REWRITTEN_EVERY", 0.0)
    line = ProgressLine("L-BFGS-B")
    line.update(1, 0, "0.500000")
    line.update(2, 1, None)
    line.close(2, 1, None)
    assert terminal.getvalue().split("\x1b[2K")[1:] == [
        "  L-BFGS-B: 1 evaluation, 0 iterations, loss=0.500000\r\r",
        "  L-BFGS-B: 2 evaluations, 1 iteration\r\r",
        "  L-BFGS-B: 2 evaluations, 1 iteration\n",
    ]
