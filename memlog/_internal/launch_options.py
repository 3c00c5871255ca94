"""Options that ``memlog run`` passes to the processes that it launches, in one environment variable.

``MEMLOG_LAUNCH`` holds the options as JSON, without secrets. `memlog.settings` uses the options as defaults.
`memlog.launch` begins a session if a script does not call memlog itself.
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
ONE_LINE = "end"
"""Value of the setting ``quiet`` under ``memlog run``."""

_DEFAULTS = ("directory", "backends", "alerts", "project", "name", "every", "layers", "budget")


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of ``memlog run``. Their names are those of `memlog.settings.Settings`.

    Attributes:
        pid: Process id of the launched process. It must be the first field, because
            ``launch/site/sitecustomize.py`` relies on this order.
        directory: Folder that holds the runs' folders. The path is absolute because a script may change its
            working directory.
        changed: Modification time of ``directory`` before the launch, in nanoseconds of the file system's
            clock; ``None``: the folder did not exist. A new run changes this time. So if the time is
            the same at the end, memlog knows that nothing was recorded.
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
    quiet: bool = False

    def encode(self) -> str:
        """Return the value of the environment variable."""
        return msgspec.json.encode(self).decode()


def launch() -> Launch | None:
    """Return the options of ``memlog run`` for this process; ``None`` if ``memlog run`` did not launch it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Launch)
    except msgspec.MsgspecError as error:  # perhaps written by another version of memlog
        warn(f"memlog: {VARIABLE} can't be read ({error}) and is ignored")
        return None


def defaults() -> dict[str, Any]:
    """Return the options of ``memlog run`` as defaults for ``init``.

    A run without a name gets the script's file name.

    Only the first rank opens a run in a tracker. The other ranks get no backend. They join the tracker's run
    that their script opens, and write their own journals.
    """
    given = launch()
    if given is None:
        return {}
    values = {field: getattr(given, field) for field in _DEFAULTS if getattr(given, field)}
    values["quiet"] = given.quiet or ONE_LINE  # the command's output stays nearly as it is
    if script := _script():
        values.setdefault("name", script)
    if not distributed.is_first():
        values["backends"] = ()
    return values


def _script() -> str | None:
    """Return the file name of the running script; ``None`` for ``python -c`` and the like."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    return None if name in {"", "-", "-c", "-m"} else name
