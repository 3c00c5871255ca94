"""Burgers' and the heat equation, solved with PhiFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from phi.torch import flow

from hyco.config import Equation

Field: TypeAlias = Any  # PhiFlow has no types
Step: TypeAlias = Callable[[Field, Any], Field]

FIELDS = {"burgers": "velocity", "heat": "temperature"}
"""Name of each equation's field."""


def time_step(equation: Equation) -> Step:
    """Return a function that advances a field by ``dt``: explicit diffusion, semi-Lagrangian advection."""

    def step(field: Field, coefficient: Any) -> Field:
        field = flow.diffuse.explicit(field, coefficient, dt=equation.dt)
        if equation.name == "burgers":
            field = flow.advect.semi_lagrangian(field, field, dt=equation.dt)
        return field

    compiled: Step = flow.math.jit_compile(step)
    return compiled


def random_field(equation: Equation, resolution: int, simulations: int) -> Field:
    """Return smooth random fields, one per simulation."""
    flow.math.seed(0)
    shape = [flow.batch(batch=simulations)]
    if equation.name == "burgers":
        shape.append(flow.channel(vector="x,y"))
    noise = flow.Noise(*shape, scale=equation.size / 5, smoothness=2.0)
    return flow.CenteredGrid(noise, **_square(equation, resolution))


def to_numpy(field: Field) -> NDArray[np.float32]:
    """Return a field's values as ``[simulation, channel, x, y]``."""
    dimensions = ["batch", "vector", "x", "y"] if "vector" in field.shape else ["batch", "x", "y"]
    values: NDArray[np.float32] = field.values.numpy(dimensions).astype(np.float32)
    return values if "vector" in field.shape else values[:, np.newaxis]


def from_numpy(equation: Equation, values: NDArray[np.float32]) -> Field:
    """Return the field with values of ``[simulation, channel, x, y]``."""
    batch, spatial = flow.batch("batch"), flow.spatial("x,y")
    if equation.name == "burgers":
        tensor = flow.math.tensor(values, batch, flow.channel(vector="x,y"), spatial)
    else:
        tensor = flow.math.tensor(values[:, 0], batch, spatial)
    return flow.CenteredGrid(tensor, **_square(equation, values.shape[-1]))


def _square(equation: Equation, resolution: int) -> dict[str, Any]:
    bounds = flow.Box(x=equation.size, y=equation.size)
    return {
        "boundary": flow.extrapolation.PERIODIC,
        "x": resolution,
        "y": resolution,
        "bounds": bounds,
    }
