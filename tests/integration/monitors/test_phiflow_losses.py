"""Losses that real optimisers call: PhiFlow, which hangs if a loss raises, and SciPy.

Each runs in a process of its own with a time limit.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.events import events_in, runs_in

from memlog.events import Evaluation, Health

pytestmark = pytest.mark.integration
needs_phiflow = pytest.mark.skipif(
    importlib.util.find_spec("phi") is None, reason="phiflow is not installed: group `examples`"
)

SETTINGS = {"PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}  # PhiFlow warns

BURGERS = """
    import json, sys
    import torch
    from phi.torch.flow import *
    import memlog
    torch.set_num_threads(1)

    @math.jit_compile
    def step(u, nu):
        u = diffuse.explicit(u, nu, dt=0.8)
        return advect.semi_lagrangian(u, u, dt=0.8)

    def wave(x):
        return math.stack({"x": math.sin(PI * x.vector["x"] / 50), "y": math.cos(PI * x.vector["y"] / 50)},
                          channel("vector"))

    true = CenteredGrid(wave, extrapolation.PERIODIC, x=16, y=16, bounds=Box(x=100, y=100))
    viscosity = math.tensor(0.1)

    def rollout(u):
        for _ in range(3):
            u = step(u, viscosity)
        return u

    target = rollout(true)
    calls = []

    def loss(u):
        calls.append(1)
        return field.l2_loss(rollout(u) - target)

    def solve(function, x0, iterations=4):
        calls.clear()
        with math.SolveTape() as tape:
            x = math.minimize(function, math.Solve("L-BFGS-B", abs_tol=1e-8, x0=x0, max_iterations=iterations,
                                                   suppress=(math.NotConverged,)))
        return x, int(tape[0].function_evaluations.numpy().max()), len(calls)
"""


def lines_of(output: str, beginning: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(beginning)]


def result(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


@needs_phiflow
def test_phiflows_evaluations_are_events(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    plain, _, plain_calls = solve(loss, true * 0)
    with memlog.init("local"):
        watched, evaluations, calls = solve(memlog.watch_loss(loss, verbose_evaluations=3), true * 0)
    print(json.dumps([bool((plain.values == watched.values).all), plain_calls, evaluations, calls]))
    """
    output = child.run(script, tmp_path, timeout=100, **SETTINGS)
    same, plain_calls, evaluations, calls = result(output)
    assert same
    assert plain_calls == evaluations == calls > 3
    [run] = runs_in(tmp_path)
    found = events_in(run, Evaluation)
    assert [event.evaluation for event in found] == list(range(calls))
    values = [event.value or 0 for event in found]
    assert values[-1] < values[0] / 10
    assert lines_of(output, "    Iteration ") == [
        f"    Iteration {i + 1}: loss={values[i]:.6f}" for i in range(3)
    ]


@needs_phiflow
@pytest.mark.seed(49)
def test_a_batch_of_problems_shares_evaluations_and_prints_as_phiml_does(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    guess = math.expand(true * 0, batch(batch=2)) + math.linspace(0, .5, batch(batch=2))
    with memlog.init("local"):
        _, evaluations, calls = solve(memlog.watch_loss(loss), guess)
    print(json.dumps([evaluations, calls]))
    """
    output = child.run(script, tmp_path, timeout=100, **SETTINGS)
    evaluations, calls = result(output)
    assert evaluations == calls
    assert len(events_in(runs_in(tmp_path)[0], Evaluation)) == calls
    first = lines_of(output, "    Iteration 1")
    assert first == [
        "    Iteration 1: loss=(121.878, 185.878) along batch\N{MODIFIER LETTER SMALL B}"
    ]


@needs_phiflow
def test_gradients_and_jit_compiled_losses_can_be_watched(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    value, gradient = math.gradient(memlog.watch_loss(loss), "u")(true * 0)
    compiled = memlog.watch_loss(math.jit_compile(loss))
    values = [float(compiled(true * 0)) for _ in range(2)]
    traced = math.jit_compile(memlog.watch_loss(loss))
    print(json.dumps([float(value), *values, float(traced(true * 0))]))
    """
    output = child.run(script, tmp_path, timeout=100, **SETTINGS)
    assert result(output) == pytest.approx([121.8778] * 4, rel=1e-4)
    # While PhiFlow traces the loss, evaluations have no value and are printed without one.
    assert len(lines_of(output, "  Loss evaluation ")) > 3
    assert len(lines_of(output, "    Iteration ")) == 3


@needs_phiflow
@pytest.mark.seed(163)
def test_no_error_of_memlogs_own_reaches_the_loss(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    import memlog.monitors.loops

    def fail(alert):
        raise SystemExit(1)

    session = memlog.init("local", alerts=["host.rss > 1 MiB"], on_alert=fail)
    memlog.monitors.loops.read = None
    sys.stdout.close()
    _, _, calls = solve(memlog.watch_loss(loss), true * 0)
    assert calls > 3
    memlog.finish()
    """
    # The script must end with code 0 before the time limit.
    child.run(script, tmp_path, timeout=100, **SETTINGS)
    faults = events_in(runs_in(tmp_path)[0], Health)[-1].faults
    assert {*faults} >= {
        "on_alert: SystemExit",
        "printing: ValueError",
        "reading a loss: TypeError",
    }


@needs_phiflow
@pytest.mark.seed(170)
def test_field_operations_are_profiled_by_the_tracers_scopes(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    tracer = memlog.MemoryTracer(device="cpu")
    diffuse_by = tracer.scope("diffusion")(diffuse.explicit)
    advect_by = tracer.scope("advection")(advect.semi_lagrangian)

    def traced_step(u):
        u = diffuse_by(u, viscosity, dt=0.8)
        return advect_by(u, u, dt=0.8)

    def traced_loss(u):
        calls.append(1)
        for _ in range(3):
            u = traced_step(u)
        return field.l2_loss(u - target)

    plain, _, _ = solve(loss, true * 0)
    with tracer.trace():
        traced, _, evaluations = solve(traced_loss, true * 0)
    layers = {{}}
    for path in ("(diffusion)", "(advection)"):
        found = tracer.get_layer_figures(path)
        layers[path] = {{phase.phase: [phase.calls, phase.allocated] for phase in found.phases}}
    largest = float(math.max(abs((plain - traced).values)))
    print(json.dumps([evaluations, largest, layers, tracer.result.attributed, tracer.health.faults]))
    """
    output = child.run(script, tmp_path, timeout=100, **SETTINGS)
    evaluations, largest, layers, attributed, faults = result(output)
    assert faults == {}
    assert largest < 1e-4
    for phases in layers.values():
        calls, allocated = phases["forward"]
        assert calls == 3 * evaluations
        assert allocated > calls * 2 * 16 * 16 * 4  # more than the field that it returns
        assert phases["backward"][1] > 0
    assert attributed > 0.9


@needs_phiflow
def test_an_error_of_the_losss_own_is_recorded_before_phiflow_hangs(tmp_path: Path) -> None:
    script = f"""{BURGERS}
    import os

    def failing(u):
        if len(calls) == 2:
            raise FloatingPointError("diverged")
        return loss(u)

    session = memlog.init("local")
    try:
        solve(memlog.watch_loss(failing), true * 0)
    except FloatingPointError as error:
        print(json.dumps(str(error)))
    memlog.finish("failed")
    sys.stdout.flush()
    os._exit(0)  # a thread of PhiFlow's waits for ever
    """
    output = child.run(script, tmp_path, timeout=100, **SETTINGS)
    assert result(output) == "diverged"
    assert "    Iteration 3: raised FloatingPointError" in output.splitlines()
    errors = [event.error for event in events_in(runs_in(tmp_path)[0], Evaluation)]
    assert errors == [None, None, "FloatingPointError"]


def test_scipy_minimises_a_watched_loss_and_sends_it_to_its_workers(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    script = """
    import json
    import numpy as np
    from scipy.optimize import differential_evolution, minimize, rosen, rosen_der
    import memlog

    def loss(x):
        return rosen(x), rosen_der(x)

    def height(x):
        return float(rosen(x))

    if __name__ == "__main__":
        with memlog.init("local"):
            watched = memlog.watch_loss(loss, verbose_evaluations=0)
            found = minimize(watched, np.zeros(2), jac=True, method="L-BFGS-B")
        spread = differential_evolution(memlog.watch_loss(height), [(0, 2)] * 2, workers=2, maxiter=3,
                                        updating="deferred", rng=0)
        print(json.dumps([found.x.tolist(), found.nfev, found.nit, bool(spread.fun < 1)]))
    """
    x, evaluations, iterations, spread = result(
        child.run(script, tmp_path, timeout=100, **SETTINGS)
    )
    assert x == pytest.approx([1, 1], abs=1e-4)
    assert evaluations > iterations
    assert spread
    assert len(events_in(runs_in(tmp_path)[0], Evaluation)) == evaluations
