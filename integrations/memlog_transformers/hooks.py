"""What a callback can't do: join a Trainer by itself, and see where evaluations and saving begin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler

import memlog
from memlog_transformers.callback import MemlogCallback

Method: TypeAlias = Callable[..., Any]


def install() -> None:
    """Let every Trainer of this process report to the session that runs, if one does."""
    _wrap(CallbackHandler, "on_train_begin", _begin)
    _wrap(Trainer, "evaluation_loop", _evaluate)
    _wrap(Trainer, "_save_checkpoint", _save)


def _wrap(owner: type, name: str, around: Method) -> None:
    """Replace a method by ``around``, which takes the method before the method's own arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapped)


def _begin(method: Method, handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a training, with one callback that counts: the Trainer's last, behind those that open runs."""
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
    """Evaluate as the phase ``validation``. A Trainer predicts with the same method."""
    if description != "Evaluation":
        return method(trainer, dataloader, description, *args, **kwargs)
    with memlog.phase("validation"):
        return method(trainer, dataloader, description, *args, **kwargs)


def _save(method: Method, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint as the phase ``checkpoint``."""
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)
