"""Phases that memlog marks in a program without a trainer: ``torch.save``, ``dcp.save`` and ``eval mode``.

While a session runs, memlog replaces three functions that no training step calls: ``torch.save``,
``torch.distributed.checkpoint.save`` and ``torch.nn.Module.eval``. ``Module.train`` is replaced only from a
model's ``eval()`` to its next ``train()``. The phase ``eval mode`` lasts from one to the other. If the
program makes a step in between, it trains in evaluation mode, and there is no phase.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.replacements import Replacements

if TYPE_CHECKING:
    from memlog.session.phases import OpenPhase, Phases

_SAVES = {
    "torch": ("torch.save", ("torch", "torch.serialization")),
    "torch.distributed.checkpoint.state_dict_saver": (
        "dcp.save",
        ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint"),
    ),
}
"""Modules after whose import ``save`` is replaced, the phase's name, and the modules that have ``save``."""
_EVALUATION = "eval mode"
_OF_TRAINERS = "checkpoint"
"""Phase in which memlog's integrations with trainers save."""


class UnmarkedPhases:
    """Replacements of torch's functions from `begin` to `stop`. No method raises.

    Args:
        phases: Function that returns the session's phases.
        last_step: Function that returns the number of the last completed step; ``None``: no step.
        claimed: Function that returns whether a trainer counts the steps.
    """

    def __init__(
        self,
        phases: Callable[[], Phases],
        last_step: Callable[[], int | None],
        claimed: Callable[[], bool],
        diagnostics: Diagnostics,
    ) -> None:
        self._phases = phases
        self._last_step = last_step
        self._claimed = claimed
        self._diagnostics = diagnostics
        self._generation = processes.generation
        self._replaced = Replacements()
        self._saving = False
        self._evaluated: tuple[weakref.ref[Any], OpenPhase, int] | None = None
        """Model in evaluation mode, its phase, and the last step before."""

    def begin(self) -> None:
        """Replace the functions as soon as their modules are imported."""
        with self._diagnostics.contained("noticing saves and evaluations"):
            self._replaced.when_imported(_SAVES, self._imported)

    def stop(self) -> None:
        """Restore the functions, unless another package has replaced them later. End the phase."""
        with self._diagnostics.contained("noticing saves and evaluations"):
            self._replaced.undo()
            self._end_evaluation()

    def _imported(self, module: Any) -> None:
        with self._diagnostics.contained("noticing saves and evaluations"):
            label, owners = _SAVES[module.__name__]
            replacement = self._saving_phase(label, module.save)
            for owner in owners:
                if owner in sys.modules and hasattr(sys.modules[owner], "save"):
                    self._replaced.replace(sys.modules[owner], "save", replacement)
            if module.__name__ == "torch":
                kind = module.nn.Module
                self._replaced.replace(kind, "eval", self._evaluating(kind.eval))

    def _may_begin(self) -> bool:
        """Return whether a phase may begin: other threads' work does not make this thread's peak."""
        return (
            processes.generation == self._generation
            and threading.current_thread() is threading.main_thread()
        )

    def _saving_phase(self, label: str, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            if self._saving or not self._may_begin() or not self._replaced:
                return save(*args, **kwargs)
            phases = self._phases()
            if _OF_TRAINERS in phases.open_labels():
                return save(*args, **kwargs)
            self._saving = True
            phase, error = phases.begin(label), None
            try:
                return save(*args, **kwargs)
            except BaseException as failure:
                error = type(failure).__name__
                raise
            finally:
                self._saving = False
                phases.end(phase, error)

        return saving

    def _evaluating(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(evaluate)
        def evaluating(model: Any) -> Any:
            if self._replaced and self._may_begin():
                with self._diagnostics.contained("noticing an evaluation"):
                    self._begin_evaluation(model)
            return evaluate(model)

        return evaluating

    def _begin_evaluation(self, model: Any) -> None:
        """Begin the phase if a model that was in training mode is evaluated after a step."""
        step = self._last_step()
        if self._evaluated is not None and self._evaluated[2] != step:
            self._end_evaluation()
        if self._evaluated is not None or step is None or self._claimed() or not model.training:
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        phase = self._phases().begin(_EVALUATION)
        if phase is not None:
            self._evaluated = (weakref.ref(model), phase, step)
            kind = sys.modules["torch"].nn.Module
            self._replaced.replace(kind, "train", self._training(kind.train))

    def _training(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def training(model: Any, mode: bool = True) -> Any:
            if mode and self._evaluated is not None and self._evaluated[0]() is model:
                with self._diagnostics.contained("noticing that an evaluation ends"):
                    self._end_evaluation()
            return train(model, mode)

        return training

    def _end_evaluation(self) -> None:
        if self._evaluated is None:
            return
        (_, phase, step), self._evaluated = self._evaluated, None
        self._replaced.restore_newest("train")
        if self._last_step() == step:
            self._phases().end(phase)
        else:
            self._phases().discard(phase)
