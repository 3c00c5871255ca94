"""Notice, in the training process, that the program is about to end a run.

Everything that ends a run calls ``MlflowClient.set_terminated``: ``mlflow.end_run``, the end of a block
``with mlflow.start_run()``, MLflow at exit, and the loggers and callbacks of Lightning, Transformers and
Accelerate. MLflow has no hook for it, so memlog replaces this method of the class during its session.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from memlog.events import Status

Before = Callable[[str, Status], object]

_METHOD = "set_terminated"
_STATUSES: dict[object, Status] = {
    None: "finished",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "killed",
}
_listeners: list[Before] = []


def watch(before: Before) -> Callable[[], None]:
    """Call ``before`` with a run's id and status before the run ends. Return a function that stops this."""
    client = getattr(sys.modules.get("mlflow"), "MlflowClient", None)
    if client is None:
        return lambda: None
    if not _listeners:
        setattr(client, _METHOD, _Replacement(getattr(client, _METHOD)).method)
    _listeners.append(before)
    return functools.partial(_stop, client, before)


def _stop(client: Any, before: Before) -> None:
    if before in _listeners:
        _listeners.remove(before)
        original = getattr(getattr(client, _METHOD), "memlog_replaces", None)
        if not _listeners and original is not None:
            setattr(client, _METHOD, original)


class _Replacement:
    """The method that memlog puts in the place of ``original``."""

    def __init__(self, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def set_terminated(self: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
            status = _STATUSES.get(args[0] if args else kwargs.get("status"))
            if status is not None:
                for before in tuple(_listeners):
                    before(str(run_id), status)
            return original(self, run_id, *args, **kwargs)

        set_terminated.memlog_replaces = original  # type: ignore[attr-defined] # read by `_stop`
        self.method = set_terminated
