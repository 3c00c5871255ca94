"""memlog's integration with the Trainers of Hugging Face's ``transformers`` and of TRL.

Importing this package changes every ``Trainer`` of the process. A ``Trainer`` gets a `MemlogCallback` when it
begins to train. Its evaluations and checkpoints are marked as phases. A session imports this package as soon
as the script has imported ``transformers.trainer``, so the script needs no change. If no session runs, each
``Trainer`` works as usual.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback

import memlog
from memlog._internal.replacements import Method, wrap_method
from memlog._internal.terminal import say

__all__ = ["MemlogCallback"]


class MemlogCallback(TrainerCallback):  # type: ignore[misc] # mypy does not read transformers
    """Report a Trainer's steps to the running session, with the numbers that the Trainer itself logs.

    If the session begins before the training, a Trainer gets this callback automatically. If no session runs,
    the callback prints one line and records nothing.

    The number of a step is ``state.global_step``. It counts updates: an update from several batches is one
    step, and an update that a gradient scaler skips is a step, too. A training that resumes from a checkpoint
    continues with the checkpoint's number.
    """

    counts = True
    """False if another callback of the same Trainer counts the steps."""
    _has_told = False
    """True if the session knows what a checkpoint of this training saves."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop memlog from counting optimizer steps, because this callback counts the steps."""
        session = memlog.current_session()
        if session is None:
            say("this training is not recorded: call memlog.init() before trainer.train()")
        else:
            self._has_told = False
            session.claim_steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count an update. After the first, tell the session what a checkpoint will save."""
        session = memlog.current_session()
        if session is not None and self.counts:
            session.count_step(state.global_step)
            if not self._has_told:
                self._has_told = True
                with session.health.contained("reading how the Trainer saves"):
                    _tell_saving(session, args, state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Let memlog count optimizer steps again. The script may go on with its own training loop."""
        session = memlog.current_session()
        if session is not None:
            session.release_steps()


_training: list[Any] = []
"""Trainers whose ``train`` runs, the innermost last."""
_OWN_METHODS = ("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler")
_ELSEWHERE = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def _train(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    _training.append(trainer)
    try:
        return method(trainer, *args, **kwargs)
    finally:
        _training.pop()


def _tell_saving(
    session: memlog.Session, args: Any, state: Any, model: Any, optimizer: Any, **_: Any
) -> None:
    """Tell the session what this process saves, and how, if that is evident.

    It is not if the trainer or the model has methods of its own for saving, or if FSDP or DeepSpeed saves.
    """
    kind = type(_training[-1]) if _training else None
    methods = [(getattr(Trainer, name), getattr(kind, name, None)) for name in _OWN_METHODS]
    is_own = _has_own_save(model) or any(
        # TRL's trainers write a description of the model and then call the Trainer's method.
        method is not known and not (method and method.__module__.startswith("trl."))
        for known, method in methods
    )
    elsewhere = args.fsdp or args.deepspeed or any(map(os.environ.get, _ELSEWHERE))
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    saves = args.should_save and strategy != "no" and not is_own and not elsewhere
    first = None
    if strategy == "steps" and state.save_steps > 0:
        done = state.global_step // state.save_steps
        first = min((done + 1) * state.save_steps, state.max_steps)
    session.will_save(
        model,
        () if args.save_only_model else (optimizer,),
        "transformers_trainer" if saves else None,
        first_at=first,
        trained_only="Peft" in type(model).__name__,
    )


def _has_own_save(model: Any) -> bool:
    """Return whether a model saves itself in another way than Transformers' models and PEFT's do.

    A ``functools.partial`` that only sets ``max_shard_size`` is no other way: the session reads the size.
    """
    method = getattr(type(model), "save_pretrained", None)
    if method is None:
        return False  # the Trainer saves the state_dict() of such a model
    if getattr(model, "_hf_peft_config_loaded", False):
        return True  # adapters alone are saved
    own = vars(model).get("save_pretrained")
    is_partial = isinstance(own, functools.partial) and own.func == method.__get__(model)
    if own is not None and not (
        is_partial and not own.args and set(own.keywords) == {"max_shard_size"}
    ):
        return True
    return method is not PreTrainedModel.save_pretrained and not method.__module__.startswith(
        "peft."
    )


def _begin(method: Method, handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin a training in which exactly one `MemlogCallback` counts the steps.

    If the Trainer has no `MemlogCallback`, this function adds one at the end of the list, after the callbacks
    that open the trackers' runs.
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
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)


wrap_method(CallbackHandler, "on_train_begin", _begin)
wrap_method(Trainer, "train", _train)
wrap_method(Trainer, "evaluation_loop", _evaluate)
wrap_method(Trainer, "_save_checkpoint", _save)
