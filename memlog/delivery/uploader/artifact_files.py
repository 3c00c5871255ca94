"""A run's artifact files, as paths for trackers' clients.

Other processes may write to a run's folder. After memlog has checked a file, another process could replace
the file by a link before the client opens its path. So the client gets a private copy of the checked file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from memlog.events import Artifact
from memlog.journal import RunDirectory
from memlog.journal.artifacts import open_artifact, safe_name

_CHUNK = 1024**2
_SHARE = 2
"""Divisor of the file system's free bytes. If a file is larger than the result, memlog makes no copy."""


class ArtifactFiles:
    """Private copies of a run's artifact files. At most one copy exists at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._made: tuple[tuple[object, ...], Path] | None = None
        self._removed: weakref.finalize[..., ArtifactFiles] | None = None

    def of(self, artifact: Artifact, *, in_place: bool) -> Path | None:
        """Return a path for the client; ``None`` if the file is not a plain file in the run's own folder.

        The path leads to a copy. If the disk has no room for a copy, the path leads to the file itself. The
        copy stays until `drop`, so that the client can continue an interrupted upload. With ``in_place``, the
        path always leads to the file itself, because the client opens it much later.
        """
        file = open_artifact(self._run, artifact)
        if file is None:
            return None
        with file:
            copy = None if in_place else self._copy(file, artifact)
        return copy or self._run.path / artifact.path

    def drop(self) -> None:
        """Remove the copy. Call it when the tracker has the file."""
        self._made = None
        if self._removed is not None:
            self._removed()

    def _copy(self, file: BinaryIO, artifact: Artifact) -> Path | None:
        status = os.fstat(file.fileno())
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        known = (artifact.path, artifact.name, *identity)
        if self._made is not None and self._made[0] == known:
            return self._made[1]
        self.drop()
        try:
            folder = tempfile.mkdtemp(prefix="memlog-")
            self._removed = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / safe_name(artifact.name)
            if status.st_size <= shutil.disk_usage(folder).free // _SHARE:
                with path.open("xb") as copy:
                    shutil.copyfileobj(file, copy, _CHUNK)
                self._made = known, path
                return path
        except OSError:
            pass  # for example, the disk is full; `of` then returns the path of the run's own file
        self.drop()
        return None
