"""Callback that counts a Lightning trainer's steps, joins its loggers' runs and marks phases."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import memlog

# A trainer of either package takes a callback of the other, because it only calls hooks by name.
if TYPE_CHECKING or (
    "pytorch_lightning" not in sys.modules and importlib.util.find_spec("lightning")
):
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback


def _contained(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper that never raises.

    The wrapper calls ``hook`` if a session runs and the callback is the trainer's first `MemlogCallback`.
    """

    @functools.wraps(hook)
    def contained(self: MemlogCallback, trainer: Any, *args: Any, **kwargs: Any) -> None:
        session = memlog.current_session()
        if session is not None:
            with session.health.contained(f"Lightning's hook {hook.__name__}"):
                if self.is_first_in(trainer):
                    hook(self, trainer, session, *args, **kwargs)

    return contained


class MemlogCallback(Callback):
    """Report a trainer's steps, its loggers' runs and its phases to the running session.

    Each trainer gets this callback automatically. If no session runs, the callback does nothing. It stores
    nothing in checkpoints.
    """

    _session_id: str | None = None
    """Id of the session that has joined the loggers' runs."""
    _has_told = False
    """True if the session knows what a checkpoint of this fit saves."""

    def is_first_in(self, trainer: Any) -> bool:
        """Return True if this callback is the trainer's first `MemlogCallback`."""
        return self is next(c for c in [*trainer.callbacks, self] if isinstance(c, MemlogCallback))

    @_contained
    def setup(self, trainer: Any, session: memlog.Session, *_: Any, stage: str) -> None:
        """Join the loggers' runs. If the trainer is about to fit, also begin to count its steps."""
        if stage == "fit":
            self.teardown(trainer)
            session.claim_steps()
            self._has_told = False
            # Lightning has no pair of hooks around saving.
            trainer.save_checkpoint = functools.partial(_save, trainer.save_checkpoint)
        self._join(trainer, session)

    @_contained
    def on_train_batch_end(self, trainer: Any, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Count a step if the optimizers stepped in this batch. Lightning's logs use the same step number."""
        if self._session_id != session.id:  # the session has begun since `setup`
            self._join(trainer, session)
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate():  # noqa: SLF001 - Lightning itself counts with these two attributes
            session.count_step(loop._batches_that_stepped)  # noqa: SLF001
            if not self._has_told:
                self._has_told = True
                _tell_saving(trainer, session)

    @_contained
    def on_validation_start(self, trainer: Any, session: memlog.Session, *_: Any) -> None:
        """Begin the phase ``validation``, except in Lightning's sanity check before training."""
        if not trainer.sanity_checking:
            session.begin_phase("validation")

    @_contained
    def on_validation_end(self, trainer: Any, session: memlog.Session, *_: Any) -> None:
        """End the phase ``validation``."""
        if not trainer.sanity_checking:
            session.end_phase("validation")

    @_contained
    def on_exception(self, trainer: Any, session: memlog.Session, *_: Any) -> None:
        """End the phase ``validation`` and call `teardown`, so that the session can record another fit."""
        session.end_phase("validation")
        self.teardown(trainer)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Restore ``save_checkpoint`` after a fit, and let memlog count optimizer steps again."""
        if getattr(vars(trainer).get("save_checkpoint"), "func", None) is _save:
            del trainer.save_checkpoint
            if (session := memlog.current_session()) is not None:
                session.release_steps()

    def _join(self, trainer: Any, session: memlog.Session) -> None:
        self._session_id = session.id
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with session.health.contained("joining the run of a logger"):
                _join_run(session, logger)


def _join_run(session: memlog.Session, logger: Any) -> None:
    """Join the run of a logger. Lightning has already opened the run.

    The function identifies a logger by the name of its class. ``isinstance`` would not suffice, because
    Lightning and ``pytorch_lightning`` each have their own classes with these names.
    """
    names = {one.__name__ for one in type(logger).__mro__}
    if "MLFlowLogger" in names:
        uri, tags = logger.experiment.tracking_uri, logger.tags or {}
        session.join_run("mlflow", logger.run_id, uri=uri, name=tags.get("mlflow.runName"))
    elif "WandbLogger" in names:
        session.join_run("wandb", logger.experiment.id)
    elif "TensorBoardLogger" in names:
        session.join_run("tensorboard", logger.log_dir)


def _tell_saving(trainer: Any, session: memlog.Session) -> None:
    """Tell the session what this process saves, and how, if that is evident.

    It is for Lightning's own strategies on one device and of replicated models, and for its own plugin. It is
    not if the module or a callback changes the checkpoint.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    is_evident = (
        trainer.is_global_zero
        and type(strategy).__name__ in ("SingleDeviceStrategy", "DDPStrategy")
        and type(strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
        and module.on_save_checkpoint.__module__.endswith("pytorch.core.hooks")
        and not any(map(_adds_to_checkpoint, trainer.callbacks))
    )
    saving = [each for each in trainer.checkpoint_callbacks if is_evident and _saves(each)]
    every = [getattr(each, "_every_n_train_steps", 0) for each in saving]
    done = trainer.global_step
    first = min(n * (done // n + 1) for n in every) if every and all(every) else None
    total = trainer.num_training_batches * max(trainer.max_epochs or 0, 0)
    total /= trainer.accumulate_grad_batches
    if first is not None and (first > total > 0 or first > trainer.max_steps > 0):
        saving, first = [], None  # the training ends before
    weights_only = bool(saving) and all(each.save_weights_only for each in saving)
    optimizers = () if weights_only else trainer.optimizers
    session.will_save(module, optimizers, "lightning" if saving else None, first_at=first)


def _adds_to_checkpoint(callback: Any) -> bool:
    """Return whether a callback may change a checkpoint, or keep much in it.

    Of Lightning's own, those that average or prune the weights change it.
    """
    own = callback.state_dict.__module__.split(".")[0] in ("lightning", "pytorch_lightning")
    return not own or not callback.on_save_checkpoint.__module__.endswith("callbacks.callback")


def _saves(callback: Any) -> bool:
    """Return whether a callback saves after some steps or epochs, as Lightning's own does."""
    is_own = type(callback).__name__ == "ModelCheckpoint"
    return is_own and bool(callback.save_top_k or callback.save_last)


def _save(save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save a checkpoint in the phase ``checkpoint``."""
    with memlog.phase("checkpoint"):
        save(*args, **kwargs)
