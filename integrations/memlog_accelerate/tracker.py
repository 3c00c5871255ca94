"""Tracker that records the memory of an Accelerator's processes."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

import memlog


class MemlogTracker(GeneralTracker):  # type: ignore[misc] # mypy does not read accelerate
    """memlog's session as a tracker: ``Accelerator(log_with=["mlflow", MemlogTracker()])``.

    After ``accelerate.tracking.register_tracker_class(MemlogTracker)``, the tracker's name is enough:
    ``Accelerator(log_with=["mlflow", "memlog"])``. The tracker uses the running session. If there is none, it
    begins a session on every rank. memlog joins the runs that the other trackers open, and notices the
    optimizer's steps itself.

    Args:
        project: Project or experiment in which memlog opens a run; ``None``: the tracker's default. An
            Accelerator's ``init_trackers`` passes its own ``project_name`` as this argument.
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
