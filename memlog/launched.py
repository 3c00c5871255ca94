"""What ``memlog run`` tells the processes that it launches, in one environment variable.

``MEMLOG_LAUNCH`` holds it as JSON, without anything secret. `memlog.settings` takes it for defaults;
`memlog.launch` begins a session where a script calls nothing.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from memlog import ranks
from memlog.health import warn

VARIABLE = "MEMLOG_LAUNCH"

_DEFAULTS = ("directory", "backends", "alerts", "project", "name", "every", "layers", "budget")


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of ``memlog run``, by the names of `memlog.settings.Settings`.

    Attributes:
        pid: The process that was launched. Comes first: see ``launch/site/sitecustomize.py``.
        begun: When, Unix time in seconds.
        directory: The folder that holds the runs' folders, absolute: scripts change theirs.
    """

    pid: int
    begun: float
    directory: str
    backends: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    project: str | None = None
    name: str | None = None
    every: int = 1
    layers: bool = False
    budget: float = 0.01

    def encode(self) -> str:
        """The variable's value."""
        return msgspec.json.encode(self).decode()


def launch() -> Launch | None:
    """What this process was launched with; ``None`` where ``memlog run`` had no part in it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Launch)
    except msgspec.MsgspecError as error:  # another version's, perhaps: no reason to end a script
        warn(f"memlog: {VARIABLE} can't be read ({error}) and is passed over")
        return None


def defaults() -> dict[str, Any]:
    """The launcher's options as defaults for ``init``, those alone that it was given.

    Of ranks that train together the first alone opens a tracker's run of its own. For the others no
    backend is named: they join what their script opens, and keep their journal.
    """
    told = launch()
    if told is None:
        return {}
    values = {field: getattr(told, field) for field in _DEFAULTS if getattr(told, field)}
    if not ranks.is_first():
        values["backends"] = ()
    return values
