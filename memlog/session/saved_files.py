"""Files that the user saves with the run."""

from __future__ import annotations

import os
from pathlib import Path

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import Names, keep, not_kept, renamed


class SavedFiles:
    """Files that the user saved with a run, each under its own name.

    Args:
        run: The run's folder.
        diagnostics: Counts the files that could not be saved.
    """

    def __init__(self, run: RunDirectory, diagnostics: Diagnostics) -> None:
        self._run = run
        self._diagnostics = diagnostics
        self._names = Names()

    def save(self, path: str | os.PathLike[str], kind: str, name: str | None) -> Artifact | None:
        """Copy a file to the run's folder; return the copy's event, or ``None`` if there is no copy."""
        try:
            file = Path(path)
            artifact = keep(self._run, file, name, kind, self._names)
        except Exception as error:  # noqa: BLE001 - the trainer's step must not fail on a report
            self._diagnostics.drop_each("artifact_not_kept", not_kept(path, error))
            return None
        message = renamed(artifact, file.name if name is None else name, kind)
        if message is not None:
            self._diagnostics.say_once(message, message)
        return artifact
