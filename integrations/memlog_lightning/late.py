"""Support for trainers that are created before a session begins."""

from __future__ import annotations

import functools
import sys
from typing import Any

import memlog


def watch_fits() -> None:
    """Change ``Trainer.fit``: if a session runs, ``fit`` first adds the callback to a trainer without one."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        trainer = getattr(sys.modules.get(f"{package}.trainer.trainer"), "Trainer", None)
        if trainer is not None and not hasattr(trainer.fit, "looks_for_a_session"):
            trainer.fit = _looking(trainer.fit)


def _looking(fit: Any) -> Any:
    @functools.wraps(fit)
    def looking(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if (session := memlog.current_session()) is not None:
            with session.health.contained("adding memlog's callback to a trainer"):
                _add_callback(trainer)
        return fit(trainer, *args, **kwargs)

    looking.looks_for_a_session = True  # type: ignore[attr-defined] # read by `watch_fits`
    return looking


def _add_callback(trainer: Any) -> None:
    """Insert a `MemlogCallback` before the checkpoint callbacks, which Lightning keeps at the list's end."""
    from memlog_lightning.callback import MemlogCallback  # noqa: PLC0415 - only if memlog records

    if not any(isinstance(one, MemlogCallback) for one in trainer.callbacks):
        at = len(trainer.callbacks) - len(trainer.checkpoint_callbacks)
        trainer.callbacks.insert(at, MemlogCallback())
