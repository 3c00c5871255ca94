"""Callback that counts a Trainer's steps."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback

import memlog
from memlog._internal.terminal import say


class MemlogCallback(TrainerCallback):  # type: ignore[misc] # mypy does not read transformers
    """Report a Trainer's steps to the running session, with the numbers that the Trainer itself logs.

    If the session begins before the training, a Trainer gets this callback automatically. Without a session
    the callback prints one line and records nothing.

    The number of a step is ``state.global_step``. It counts updates: an update from several batches is one
    step, and an update that a gradient scaler skips is a step, too. A training that resumes from a checkpoint
    continues with the checkpoint's number.
    """

    counts = True
    """False if another callback of the same Trainer counts the steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop memlog from counting optimizer steps, because this callback counts the steps."""
        session = memlog.current_session()
        if session is None:
            say("this training is not recorded: call memlog.init() before trainer.train()")
        else:
            session.claim_steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count an update."""
        session = memlog.current_session()
        if session is not None and self.counts:
            session.count_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Let memlog count optimizer steps again. The script may go on with its own training loop."""
        session = memlog.current_session()
        if session is not None:
            session.release_steps()
