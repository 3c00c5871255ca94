"""Callback that counts a Trainer's steps."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback

import memlog
from memlog._internal.terminal import say


class MemlogCallback(TrainerCallback):  # type: ignore[misc] # mypy does not read transformers
    """Report a Trainer's steps to the running session, under the numbers of the Trainer's own rows.

    A Trainer gets a callback by itself if the session begins before the training. Without a session the
    callback prints one line and records nothing.

    The steps are those of ``state.global_step``: one per update, even if its gradient comes from several
    batches or if a gradient scaler skips it. A training that resumes from a checkpoint goes on with the
    checkpoint's number.
    """

    counts = True
    """False if another callback of the same Trainer counts the steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Let only this callback count the steps."""
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
        """Let memlog count optimizer steps again, for a loop of the script's own."""
        session = memlog.current_session()
        if session is not None:
            session.release_steps()
