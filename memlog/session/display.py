"""Display of a session: as text, and in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog.settings import Settings
from memlog.sink import LOCAL

if TYPE_CHECKING:
    from memlog.session.recording import Recording


class SessionDisplay:
    """Text and HTML of a session. No method raises."""

    id: str | None
    directory: Path | None
    settings: Settings
    health: Diagnostics
    _live: Recording | None

    def __repr__(self) -> str:
        """Return text with memlog's run, the trackers' runs that belong to it, and the session's state."""
        if self.id is None or self.directory is None:
            state = "recording nothing" if self.settings.enabled else "disabled"
            return f"<memlog.Session {state}>"
        parts = [f"run {self.id}"]
        with self.health.contained("describing a session"):
            parts += self._trackers(self.directory)
            parts.append(self._state())
        return f"<memlog.Session {', '.join(parts)}>"

    def _state(self) -> str:
        if self._live is None:
            return "ended"
        step = self._live.batches.last_step
        return "recording, no step yet" if step is None else f"recording, step {step:,}"

    def _trackers(self, directory: Path) -> list[str]:
        # Imported here to keep `import memlog` light.
        from memlog.journal import RunDirectory  # noqa: PLC0415
        from memlog.journal.run_names import tracker_runs  # noqa: PLC0415

        found = tracker_runs(RunDirectory(directory)) if directory.exists() else {}
        waiting = [name for name in self.settings.backends if name not in {LOCAL, *found}]
        return [
            *(f"{name} run {each.name or each.run_id!r}" for name, each in found.items()),
            *(f"no {name} run yet" for name in waiting),
        ]

    def _repr_html_(self) -> str | None:
        """Return the report of the run so far; ``None`` makes a notebook show the text of `__repr__`."""
        if self.directory is not None and self.directory.exists():
            from memlog.reports.notebook import run_html  # noqa: PLC0415 - only notebooks need it

            with self.health.contained("showing a session"):
                return run_html(self.directory)
        return None
