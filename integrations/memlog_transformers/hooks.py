"""Hooks in Trainers: add the callback, and mark evaluations and checkpoints as phases."""

from __future__ import annotations

from typing import Any

from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler

import memlog
from memlog._internal.method_wrapper import Method, wrap_method
from memlog_transformers.callback import MemlogCallback


def install() -> None:
    """Let every Trainer of this process report to the running session, if there is one."""
    wrap_method(CallbackHandler, "on_train_begin", _begin)
    wrap_method(Trainer, "evaluation_loop", _evaluate)
    wrap_method(Trainer, "_save_checkpoint", _save)


def _begin(method: Method, handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a training in which exactly one `MemlogCallback` counts the steps.

    A Trainer without a `MemlogCallback` gets one. It is added at the end, after the callbacks that open the
    trackers' runs.
    """
    if memlog.current_session() is not None:
        ours = [one for one in handler.callbacks if isinstance(one, MemlogCallback)]
        if not ours:
            handler.callbacks.append(MemlogCallback())
        for one in ours[1:]:
            one.counts = False
    return method(handler, *args, **kwargs)


def _evaluate(
    method: Method, trainer: Any, dataloader: Any, description: str, *args: Any, **kwargs: Any
) -> Any:
    """Evaluate in the phase ``validation``. Predictions use this method, too, but they get no phase."""
    if description != "Evaluation":
        return method(trainer, dataloader, description, *args, **kwargs)
    with memlog.phase("validation"):
        return method(trainer, dataloader, description, *args, **kwargs)


def _save(method: Method, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint in the phase ``checkpoint``."""
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)
