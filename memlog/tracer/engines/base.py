"""Interface of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from memlog.trace.records import Exactness, Fragmentation


class EngineReport(msgspec.Struct, frozen=True):
    """Result of an engine, in addition to its events."""

    unseen: tuple[str, ...] = ()
    """Limitations, in whole sentences."""
    fragmentation: Fragmentation | None = None
    fragmentation_reason: str | None = None
    dropped: dict[str, int] = {}
    """Events that could not be recorded, counted by reason."""
    lines: tuple[str, ...] = ()
    """Lines of the program, in the order of their numbers in events."""
    exactness: Exactness | None = None
    """Exactness of the peaks; ``None``: the exactness in the engine's `Choice` holds."""


class Engine(Protocol):
    """Recorder of one window, which writes to an `EventLog`."""

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Start recording on this thread; ``optimizers``: optimizers that are known already."""

    def module_begins(self, module: Any, args: Any) -> None:
        """Record the begin of a module's ``forward``.

        Called by a hook, or by code that opens a window inside the module.
        """

    def stop(self) -> EngineReport:
        """Stop recording, and write the remaining events."""

    def stop_recording(self) -> None:
        """Record nothing more. Hooks stay until `stop`. Can be called on any thread and within hooks."""

    def leave(self) -> bool:
        """Remove what `stop` could not remove; return True if nothing of the engine is left in torch."""
