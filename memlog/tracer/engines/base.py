"""What all engines have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from memlog.trace.records import Exactness, Fragmentation


class EngineReport(msgspec.Struct, frozen=True):
    """What an engine says beside its events."""

    unseen: tuple[str, ...] = ()
    """What it can't see, in whole sentences."""
    fragmentation: Fragmentation | None = None
    fragmentation_reason: str | None = None
    dropped: dict[str, int] = {}
    """What could not be recorded, counted by reason."""
    lines: tuple[str, ...] = ()
    """The lines of the program that its events number."""
    incomplete: bool = False
    """Whether something may have been allocated and freed that nobody has seen: peaks are lower bounds."""
    approximate: bool = False
    """Whether tracing changed what operations allocate: an untraced step's peak may be lower or higher."""

    def exactness(self, best: Exactness) -> Exactness:
        """How far peaks can be relied on.

        Args:
            best: If nothing was missed.
        """
        if self.approximate:
            return "approximate"
        return "lower bound" if self.incomplete else best


class Engine(Protocol):
    """Records one window into an `EventLog`."""

    def start(self, optimizers: Sequence[Any] = ()) -> None:
        """Begins, on this thread.

        Args:
            optimizers: Those that are known already.
        """

    def module_begins(self, module: Any, args: Any) -> None:
        """A module's ``forward`` begins: said by the hooks, or by who opens a window within one."""

    def stop(self) -> EngineReport:
        """Ends, and writes what is still to be written."""

    def stop_recording(self) -> None:
        """Records nothing more; everything else goes on until `stop`. Called from anywhere."""

    def leave(self) -> bool:
        """Takes out what could not be taken out at the end; ``True`` once nothing is left in torch."""
