"""Recovery of a simulation's first frame, or of a coefficient of its equation, from its frames."""

from __future__ import annotations

from typing import Any

import numpy as np
from phi.torch import flow

import memlog
from hyco.config import Config, Learnable, PhysicalParams
from hyco.equations import FIELDS, Field, from_numpy, time_step
from hyco.simulations import simulation_files


class PhysicalTrainer:
    """Inverse problem that PhiFlow's ``math.minimize`` solves through the differentiable simulation.

    Args:
        config: Configuration of the experiment.
        params: Configuration of the training.

    Raises:
        ValueError: the learnable parameter is neither the field nor the coefficient.
    """

    def __init__(self, config: Config, params: PhysicalParams) -> None:
        self.config, self.params = config, params
        self.equation = config.equation
        [(self.coefficient, self.true_value)] = self.equation.pde_params.items()
        self.field = FIELDS[self.equation.name]
        self.wanted = _only(params.learnable_parameters, known=(self.coefficient, self.field))
        self.step = time_step(self.equation)
        if params.enable_memory_monitoring:
            self.memory_monitor = memlog.EpochMemoryMonitor(
                verbose_batches=params.memory_monitor_batches
            )

    def train(self) -> None:
        """Load the frames, minimise, and print the error."""
        if hasattr(self, "memory_monitor"):
            self.memory_monitor.on_epoch_start()
        self.frames = self._ground_truth()
        if hasattr(self, "memory_monitor"):
            memlog.MemoryMonitor.print_memory_usage("After loading ground truth data: ")
        found = self._optimize()
        if hasattr(self, "memory_monitor"):
            memlog.MemoryMonitor.print_memory_usage("After optimization: ")
            self.memory_monitor.on_optimization_end()
        print(self._verdict(found))

    def _optimize(self) -> Any:
        """Return the last estimate of ``math.minimize``, converged or not."""
        limits = {"abs_tol": self.params.abs_tol, "max_iterations": self.params.epochs}
        solve = flow.Solve(
            self.params.method, x0=self._guess(), suppress=(flow.NotConverged,), **limits
        )
        if not hasattr(self, "memory_monitor"):
            return flow.math.minimize(self.loss_function, solve)
        # watch_loss is the outermost wrapper: inside jit_compile it would be called only while tracing.
        watched = memlog.watch_loss(
            self.loss_function, verbose_evaluations=self.memory_monitor.verbose_batches
        )
        with memlog.track_iterations(self.params.method):
            return flow.math.minimize(watched, solve)

    def loss_function(self, learnable: Any) -> Any:
        """Return the squared distance to the ground truth, averaged over frames, one value per simulation."""
        start, coefficient = self.frames[0], flow.math.tensor(self.true_value)
        if self.wanted.name == self.field:
            start = learnable
        else:
            coefficient = learnable
        predicted, total = start, flow.math.tensor(0.0)
        for target in self.frames[1:]:
            predicted = self.step(predicted, coefficient)
            total += flow.field.l2_loss(predicted - target)
        return total / len(self.frames[1:])

    def _ground_truth(self) -> list[Field]:
        """Return the first frames of the simulations to learn from, as one batch."""
        files = simulation_files(self.config)
        chosen = [np.load(files[number]) for number in self.params.train_sim or range(len(files))]
        frames = np.stack(chosen, axis=1)[: self.params.num_predict_steps + 1]
        return [from_numpy(self.equation, frame) for frame in frames]

    def _guess(self) -> Any:
        if self.wanted.name == self.field:
            return self.frames[0] * 0 + self.wanted.initial_guess
        simulations = self.frames[0].shape.get_size("batch")
        guess = flow.math.tensor(self.wanted.initial_guess)
        return flow.math.expand(guess, flow.batch(batch=simulations))

    def _verdict(self, found: Any) -> str:
        if self.wanted.name == self.field:
            error = flow.math.max(abs((found - self.frames[0]).values)).numpy().max()
            return f"Recovered initial {self.field}: largest error {error:.4f}"
        values = ", ".join(f"{value:.4f}" for value in found.numpy("batch"))
        return f"Recovered {self.coefficient}: {values} (true {self.true_value:g})"


def _only(wanted: list[Learnable], known: tuple[str, ...]) -> Learnable:
    names = [learnable.name for learnable in wanted]
    if len(names) != 1 or names[0] not in known:
        raise ValueError(f"learnable_parameters names {names}: name one of {', '.join(known)}")
    return wanted[0]
