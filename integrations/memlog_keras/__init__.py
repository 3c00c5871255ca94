"""memlog in Keras 3: a callback that reports the steps, because Keras steps no PyTorch optimizer."""

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

    Without a session the callback does nothing. A run's steps are numbered from 0, over all epochs and over
    later calls of ``fit``.
    """

    _validation: Any = None
    """The phase that any callback began last. Keras does not report the end of an evaluation that raises."""

    @_contained
    def on_train_begin(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Count the steps from now on."""
        session.close_phase(MemlogCallback._validation)
        session.claim_steps()

    @_contained
    def on_train_end(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Let memlog count optimizer steps again."""
        session.release_steps()

    @_contained
    def on_train_batch_end(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Count a step."""
        session.step()

    @_contained
    def on_test_begin(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Begin the phase ``validation``."""
        session.close_phase(MemlogCallback._validation)
        MemlogCallback._validation = session.open_phase("validation")

    @_contained
    def on_test_end(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """End the phase ``validation``."""
        session.close_phase(MemlogCallback._validation)
