"""Interface of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from memlog.trace.records import Exactness, Fragmentation


class EngineReport(msgspec.Struct, frozen=True):
    """Report of an engine about its window. The engine's events are not part of the report."""

    unseen: tuple[str, ...] = ()
    """Limitations of the trace, as whole sentences."""
    fragmentation: Fragmentation | None = None
    fragmentation_reason: str | None = None
    dropped: dict[str, int] = {}
    """Events that could not be recorded, counted by reason."""
    lines: tuple[str, ...] = ()
    """Texts of the program's lines to which events refer. Events number the lines from 1."""
    exactness: Exactness | None = None
    """Exactness of the peaks; ``None``: as in the engine's `Choice`."""


class Engine(Protocol):
    """Recorder of one window, which writes to an `EventLog`."""

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Start recording on this thread.

        ``optimizers``: Optimizers whose state exists already.
        """

    def module_begins(self, module: Any, args: Any) -> None:
        """Record the begin of a module's ``forward``.

        The caller is a hook, or code that opens a window inside this ``forward``.
        """

    def stop(self) -> EngineReport:
        """Stop recording, and write the remaining events."""

    def stop_recording(self) -> None:
        """Stop recording, and leave the hooks in torch until `stop`. Hooks and all threads may call this."""

    def leave(self) -> bool:
        """Remove from torch what `stop` could not remove.

        Return True if nothing of the engine is left in torch.
        """
