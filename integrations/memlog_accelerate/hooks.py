"""Hooks in Accelerators: record the ranks that have no tracker, and mark checkpoints as phases."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

import memlog
from memlog._internal.method_wrapper import Method, wrap_method
from memlog_accelerate.tracker import MemlogTracker


def install() -> None:
    """Install the hooks for every Accelerator of this process."""
    wrap_method(Accelerator, "init_trackers", _init_trackers)
    wrap_method(Accelerator, "save_state", _save_state)


def _init_trackers(
    method: Method,
    accelerator: Any,
    project_name: str,
    config: Any = None,
    init_kwargs: Any = None,
) -> None:
    """Create the trackers, including `MemlogTracker` on all ranks.

    An Accelerator itself creates a tracker of a registered class only on the first rank.
    """
    method(accelerator, project_name, config, init_kwargs)
    if not accelerator.is_main_process and MemlogTracker.name in accelerator.log_with:
        MemlogTracker(project_name, **(init_kwargs or {}).get(MemlogTracker.name, {}))


def _save_state(method: Method, *args: Any, **kwargs: Any) -> Any:
    """Save the state in the phase ``checkpoint``."""
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)
