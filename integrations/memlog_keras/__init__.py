"""memlog's integration with Keras 3: a callback that reports the steps.

memlog can't notice these steps by itself, because Keras steps no PyTorch optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

import memlog

__all__ = ["MemlogCallback"]

Hook: TypeAlias = Callable[..., None]


def _contained(hook: Hook) -> Hook:
    """Return a wrapper that calls ``hook`` if a session runs, and that never raises."""

    @functools.wraps(hook)
    def contained(self: MemlogCallback, *args: Any, **kwargs: Any) -> None:
        session = memlog.current_session()
        if session is not None:
            with session.health.contained(f"Keras's hook {hook.__name__}"):
                hook(self, session, *args, **kwargs)

    return contained


class MemlogCallback(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Report the steps and evaluations of ``model.fit`` to the running session.

    If no session runs, the callback does nothing. A run's steps are numbered from 0. The numbering
    continues over all epochs and over later calls of ``fit``.
    """

    _validation: Any = None
    """Newest phase ``validation`` that a callback of this process began. Keras does not report the end of an
    evaluation that raised an exception. So the next training or evaluation ends this phase."""

    @_contained
    def on_train_begin(self, session: memlog.Session, *_: Any, **__: Any) -> None:
        """Count the steps of ``model.fit`` from now on, instead of optimizer steps."""
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
