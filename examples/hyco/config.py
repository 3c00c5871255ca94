"""The configuration as typed records: what Hydra composed, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec


class Data(msgspec.Struct, frozen=True):
    """Simulations, and how many of them are held in memory."""

    data_dir: str
    resolution: int
    n_sims: int
    n_frames: int
    max_cached_sims: int | None = 5
    pin_memory: bool = False


class Equation(msgspec.Struct, frozen=True):
    """A partial differential equation on a periodic square.

    Attributes:
        name: Which one.
        dt: Length of a time step.
        size: Length of the square's side.
        pde_params: Its coefficient, by name.
    """

    name: Literal["burgers", "heat"]
    dt: float
    size: float
    pde_params: dict[str, float]


class UNetShape(msgspec.Struct, frozen=True):
    """How deep and how wide the network is."""

    levels: int
    filters: int


class Learnable(msgspec.Struct, frozen=True):
    """What is to be recovered: a coefficient of the equation, or the field at the start."""

    name: str
    initial_guess: float


class Monitored(msgspec.Struct, frozen=True):
    """What both trainers take."""

    epochs: int
    num_predict_steps: int
    train_sim: list[int]
    enable_memory_monitoring: bool = False
    memory_monitor_batches: int = 5


class SyntheticParams(Monitored, frozen=True, kw_only=True):
    """A network's training."""

    learning_rate: float
    batch_size: int
    use_sliding_window: bool = True
    gradient_accumulation_steps: int = 1
    use_amp: bool = False
    use_checkpointing: bool = False


class PhysicalParams(Monitored, frozen=True, kw_only=True):
    """An inverse problem."""

    method: str
    abs_tol: float
    learnable_parameters: list[Learnable]


class Config(msgspec.Struct, frozen=True):
    """One experiment; what a kind of trainer does not need is ``None``."""

    kind: Literal["synthetic", "physical"]
    data: Data
    equation: Equation
    network: UNetShape | None
    synthetic: SyntheticParams | None
    physical: PhysicalParams | None

    @property
    def folder(self) -> Path:
        """Where its simulations are: those of another equation or size have another."""
        coefficient = "_".join(f"{k}{v:g}" for k, v in self.equation.pde_params.items())
        side = f"{self.data.resolution}x{self.data.resolution}x{self.data.n_frames}"
        step = f"dt{self.equation.dt:g}_size{self.equation.size:g}"
        return Path(self.data.data_dir) / f"{self.equation.name}_{side}_{step}_{coefficient}"


def read_config(composed: Mapping[str, Any]) -> Config:
    """Checks what Hydra composed.

    Raises:
        ValueError: a value is missing, of the wrong type (`msgspec.ValidationError`), or does not go with
            another; the message says which.
    """
    kind = composed["run_params"]["model_type"]
    models, given = composed["model"], composed["trainer_params"]
    others = "method" if kind == "synthetic" else "batch_size"  # which the other trainer alone has
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
            f"frames after the first: {steps + 1} are the fewest"
        )
    return config
