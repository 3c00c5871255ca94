"""Typed records of the configuration that Hydra composes; it is checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec


class Data(msgspec.Struct, frozen=True):
    """Simulations on disk, and the number of simulations that are kept in memory."""

    data_dir: str
    resolution: int
    n_sims: int
    n_frames: int
    max_cached_sims: int | None = 5
    pin_memory: bool = False


class Equation(msgspec.Struct, frozen=True):
    """A partial differential equation on a periodic square.

    Attributes:
        name: Name of the equation.
        dt: Length of a time step.
        size: Length of the square's side.
        pde_params: The equation's coefficient, by name.
    """

    name: Literal["burgers", "heat"]
    dt: float
    size: float
    pde_params: dict[str, float]


class UNetShape(msgspec.Struct, frozen=True):
    """Depth and width of the network."""

    levels: int
    filters: int


class Learnable(msgspec.Struct, frozen=True):
    """Value to recover: a coefficient of the equation, or the field at the start."""

    name: str
    initial_guess: float


class Monitored(msgspec.Struct, frozen=True):
    """Parameters of both trainers."""

    epochs: int
    num_predict_steps: int
    train_sim: list[int]
    enable_memory_monitoring: bool = False
    memory_monitor_batches: int = 5


class SyntheticParams(Monitored, frozen=True, kw_only=True):
    """Parameters of a network's training."""

    learning_rate: float
    batch_size: int
    use_sliding_window: bool = True
    gradient_accumulation_steps: int = 1
    use_amp: bool = False
    use_checkpointing: bool = False


class PhysicalParams(Monitored, frozen=True, kw_only=True):
    """Parameters of an inverse problem."""

    method: str
    abs_tol: float
    learnable_parameters: list[Learnable]


class Config(msgspec.Struct, frozen=True):
    """One experiment; the parts that its kind of trainer does not need are ``None``."""

    kind: Literal["synthetic", "physical"]
    data: Data
    equation: Equation
    network: UNetShape | None
    synthetic: SyntheticParams | None
    physical: PhysicalParams | None

    @property
    def folder(self) -> Path:
        """Folder of the experiment's simulations; each equation and size has its own."""
        coefficient = "_".join(f"{k}{v:g}" for k, v in self.equation.pde_params.items())
        side = f"{self.data.resolution}x{self.data.resolution}x{self.data.n_frames}"
        step = f"dt{self.equation.dt:g}_size{self.equation.size:g}"
        return Path(self.data.data_dir) / f"{self.equation.name}_{side}_{step}_{coefficient}"


def read_config(composed: Mapping[str, Any]) -> Config:
    """Check the configuration that Hydra composed.

    Raises:
        ValueError: a value is missing, has the wrong type (`msgspec.ValidationError`), or does not fit
            another one; the message names it.
    """
    kind = composed["run_params"]["model_type"]
    models, given = composed["model"], composed["trainer_params"]
    others = (
        "method" if kind == "synthetic" else "batch_size"
    )  # only the other trainer has this key
    if others in given:
        raise ValueError(
            f"the experiment is {kind}, and the trainer is not: trainer={kind} or {kind}_with_memory"
        )
    config = msgspec.convert(
        {
            "kind": kind,
            "data": composed["data"],
            "equation": models["physical"],
            "network": models.get("synthetic"),
            "synthetic": given if kind == "synthetic" else None,
            "physical": given if kind == "physical" else None,
        },
        Config,
    )
    steps = 0 if config.synthetic is None else config.synthetic.num_predict_steps
    if config.data.n_frames <= steps:
        raise ValueError(
            f"data.n_frames={config.data.n_frames} has no window of trainer_params.num_predict_steps={steps} "
            f"frames after the first: use at least {steps + 1} frames"
        )
    return config
