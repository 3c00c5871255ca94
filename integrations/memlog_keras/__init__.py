"""memlog in Keras 3: a callback that says the step, because Keras steps no PyTorch optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

import memlog

__all__ = ["MemlogCallback"]

Hook: TypeAlias = Callable[..., None]


def _contained(hook: Hook) -> Hook:
    """Return a hook that does nothing without a session, and whose errors do not reach training."""

    @functools.wraps(hook)
    def contained(self: MemlogCallback, *args: Any, **kwargs: Any) -> None:
        session = memlog.current_session()
        if session is not None:
            with session.health.contained(f"Keras's hook {hook.__name__}"):
                hook(self, session, *args, **kwargs)

    return contained


class MemlogCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Report the steps of ``model.fit`` and its evaluations to the session that runs.

    Without a session it does nothing. Steps are numbered from 0 over all epochs, and go on in the next
    ``fit`` with the same callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = 0
        self._next = 0

    @_contained
    def on_train_begin(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Count the steps from now on."""
        session.claim_steps()

    @_contained
    def on_train_end(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Leave the count of steps to memlog."""
        session.release_steps()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Note the number of the epoch's first step, because Keras counts batches within an epoch."""
        self._first = self._next

    @_contained
    def on_train_batch_end(self, session: memlog.Session, batch: int, *_: Any, **__: Any) -> None:
        """Count a step."""
        self._next = self._first + batch + 1
        session.count_step(self._next - 1)

    @_contained
    def on_test_begin(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Begin the phase ``validation``."""
        session.begin_phase("validation")

    @_contained
    def on_test_end(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """End the phase ``validation``."""
        session.end_phase("validation")
