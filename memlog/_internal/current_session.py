"""The running session, and options of ``memlog run``, for modules that must not import `memlog.session`.

`memlog.session` sets the running session. A monitor, for example of a loss function, publishes
its events to this session. At every call, the monitor asks this module for the session. If none runs, the
monitor publishes nothing. So a monitor can be created before ``init`` and used after ``finish``.

``MEMLOG_LAUNCH`` holds the options as JSON, without secrets. `memlog.settings` uses the options as defaults.
`memlog.launch` begins a session if a script does not call memlog itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Protocol

import msgspec

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics, warn
from memlog.events import Batch, Event


class Publisher(Protocol):
    """The part of a session that a monitor uses. No method raises."""

    @property
    def enabled(self) -> bool:
        """True if the session records."""

    @property
    def health(self) -> Diagnostics:
        """Counter of errors inside memlog."""

    @property
    def announced(self) -> bool:
        """True if the session has printed that monitoring is on."""

    def publish(self, event: Event) -> None:
        """Put an event on the bus."""

    def claim_steps(self, *, only_first: bool = False) -> None:
        """See `memlog.session.trainers.TrainerInterface.claim_steps`."""

    def count_step(self, step: int | None = None) -> tuple[int, Batch | None] | None:
        """See `memlog.session.trainers.TrainerInterface.count_step`."""

    def open_phase(self, name: str) -> object | None:
        """See `memlog.session.trainers.TrainerInterface.open_phase`."""

    def close_phase(self, phase: object, error: str | None = None) -> None:
        """See `memlog.session.trainers.TrainerInterface.close_phase`."""

    def next_evaluation(self) -> int:
        """Return the number of the next evaluation, counted from 0 over all watched loss functions."""


_publisher: Publisher | None = None
_begin: Callable[[], object] | None = None
_before_finish: list[Callable[[float], None]] = []


def publisher() -> Publisher | None:
    """Return the running session, enabled or not; ``None`` if no session runs.

    If `begin_on_demand` has set a function, `publisher` calls it first.
    """
    if _begin is not None:
        _begin()
    return _publisher


def set_publisher(new: Publisher | None) -> None:
    """Set the running session; ``None``: no session runs.

    If ``new`` is a session, also remove the function that `begin_on_demand` has set.
    """
    global _publisher  # noqa: PLW0603 - the one place that holds it
    _publisher = new
    if new is not None:
        begin_on_demand(None)


def begin_on_demand(begin: Callable[[], object] | None) -> None:
    """Set the function that `publisher` calls to begin a session when none runs; ``None``: no function."""
    global _begin  # noqa: PLW0603 - the one place that holds it
    _begin = begin


def on_demand() -> bool:
    """Return True if the next call of `publisher` begins a session."""
    return _begin is not None


def before_finish(settle: Callable[[float], None]) -> None:
    """Register ``settle``, a function that waits until pending events are published.

    Before a session ends, memlog calls ``settle`` with a time limit in seconds.
    """
    _before_finish.append(settle)


def settle(seconds: float) -> None:
    """Call every function that `before_finish` registered, each with the time limit ``seconds``."""
    for callback in _before_finish:
        callback(seconds)


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
    if not processes.is_first():
        values["backends"] = ()
    return values


def _script() -> str | None:
    """Return the file name of the running script; ``None`` for ``python -c`` and the like."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    return None if name in {"", "-", "-c", "-m"} else name
