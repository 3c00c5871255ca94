"""What ``memlog run`` tells the processes that it launches, in one environment variable.

``MEMLOG_LAUNCH`` holds it as JSON, without anything secret. `memlog.settings` takes it for defaults;
`memlog.launch` begins a session where a script calls nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from typing import Any

import msgspec

from memlog._internal import distributed
from memlog._internal.diagnostics import warn

VARIABLE = "MEMLOG_LAUNCH"

_DEFAULTS = ("directory", "backends", "alerts", "project", "name", "every", "layers", "budget")


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of ``memlog run``, by the names of `memlog.settings.Settings`.

    Attributes:
        pid: The process that was launched. Comes first: see ``launch/site/sitecustomize.py``.
        directory: The folder that holds the runs' folders, absolute: scripts change theirs.
        changed: When it was last changed before that, in nanoseconds as the file system counts them;
            ``None``: there was no such folder. It changes as a run begins.
    """

    pid: int
    directory: str
    changed: int | None = None
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

    A run that was given no name is called after its script; the runs of all ranks but the first name theirs.

    Of ranks that train together the first alone opens a tracker's run of its own. For the others no
    backend is named: they join what their script opens, and keep their journal.
    """
    told = launch()
    if told is None:
        return {}
    values = {field: getattr(told, field) for field in _DEFAULTS if getattr(told, field)}
    if script := _script():
        values.setdefault("name", script)
    if not distributed.is_first():
        values["backends"] = ()
        values["name"] = f"{values.get('name', '')} rank {distributed.described()['rank']}".strip()
    return values


def _script() -> str | None:
    """The file name of the program that runs here; ``None`` for ``python -c`` and the like."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    return None if name in {"", "-", "-c", "-m"} else name
