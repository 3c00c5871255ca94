"""memlog as a tracker of Hugging Face's ``accelerate``: `MemlogTracker`.

Importing this package installs two hooks. One marks an Accelerator's checkpoints as a phase. The other lets
`MemlogTracker` also record the ranks on which an Accelerator creates no tracker.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import memlog
from memlog._internal.replacements import Method, wrap_method

__all__ = ["MemlogTracker"]


class MemlogTracker(GeneralTracker):  # type: ignore[misc] # mypy does not read accelerate
    """memlog's session as a tracker: ``Accelerator(log_with=["mlflow", MemlogTracker()])``.

    After ``accelerate.tracking.register_tracker_class(MemlogTracker)``, the tracker's name is enough:
    ``Accelerator(log_with=["mlflow", "memlog"])``. The tracker uses the running session. If there is none, it
    begins a session on every rank. memlog joins the runs that the other trackers open, and notices the
    optimizer's steps itself.

    Args:
        project: Project or experiment in which memlog opens a run; ``None``: the default of the service that
            gets the run, such as MLflow. An Accelerator's ``init_trackers`` passes its own ``project_name``.
        **settings: Further arguments of `memlog.init`, for a session that the tracker begins.

    Raises:
        MemlogError: See `memlog.init`.
    """

    name = "memlog"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        super().__init__()
        running = memlog.current_session()
        self._own = running is None
        # Not in start(), which an Accelerator calls on the main process only.
        self._session = running or memlog.init(project=project, **settings)

    @property
    def tracker(self) -> memlog.Session:
        """Session that this tracker uses."""
        return self._session

    def finish(self) -> None:
        """End the session if this tracker began it."""
        if self._own:
            self._session.finish()


def _init_trackers(
    method: Method,
    accelerator: Any,
    project_name: str,
    config: Any = None,
    init_kwargs: Any = None,
) -> None:
    """Create the trackers, including `MemlogTracker` on all ranks.

    The original method creates a tracker of a registered class on the first rank only.
    """
    method(accelerator, project_name, config, init_kwargs)
    if not accelerator.is_main_process and MemlogTracker.name in accelerator.log_with:
        MemlogTracker(project_name, **(init_kwargs or {}).get(MemlogTracker.name, {}))


def _save_state(method: Method, *args: Any, **kwargs: Any) -> Any:
    with memlog.phase("checkpoint"):
        return method(*args, **kwargs)


wrap_method(Accelerator, "init_trackers", _init_trackers)
wrap_method(Accelerator, "save_state", _save_state)
