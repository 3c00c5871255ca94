"""What a tracker can't do: record the ranks that have none, and see where an Accelerator saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from accelerate import Accelerator

import memlog
from memlog_accelerate.tracker import MemlogTracker

Method: TypeAlias = Callable[..., Any]


def install() -> None:
    """Let every Accelerator of this process do both."""
    _wrap("init_trackers", _init_trackers)
    _wrap("save_state", _save_state)


def _wrap(name: str, around: Method) -> None:
    """Replace a method by ``around``, which takes the method before the method's own arguments."""
    method = getattr(Accelerator, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(Accelerator, name, wrapped)


def _init_trackers(
    method: Method,
    accelerator: Any,
    project_name: str,
    config: Any = None,
    init_kwargs: Any = None,
) -> None:
    """Begin the session of a rank on which the Accelerator makes no tracker of a registered class."""
    method(accelerator, project_name, config, init_kwargs)
    if not accelerator.is_main_process and MemlogTracker.name in accelerator.log_with:
        MemlogTracker(project_name, **(init_kwargs or {}).get(MemlogTracker.name, {}))


def _save_state(method: Method, *args: Any, **kwargs: Any) -> Any:
    """Save as the phase ``checkpoint``."""
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)
