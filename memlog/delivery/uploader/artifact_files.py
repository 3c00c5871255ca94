"""A run's kept files as paths for trackers' clients, which open them when they like.

A run's folder may be written by others meanwhile: between a look at a file and a client's use of its path a
link could take its place. So clients get a private copy of what was looked at.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from memlog._internal.safe_files import open_plain
from memlog.events import Artifact
from memlog.journal import RunDirectory

_CHUNK = 1024**2
_SHARE = 2
"""A copy takes at most one in so many of the bytes that are free where it goes."""


def open_kept(run: RunDirectory, artifact: Artifact) -> BinaryIO | None:
    """The file, where it is a plain one in the run's own folder: a journal may come from anywhere."""
    if not artifact.path.startswith(f"{run.artifacts.name}/"):
        return None
    try:
        return open_plain(run.path, artifact.path)
    except (OSError, ValueError):
        return None


def file_of(artifact: Artifact, run: RunDirectory) -> Path | None:
    """Where it is; ``None`` where it is no plain file in the run's own folder."""
    file = open_kept(run, artifact)
    if file is None:
        return None
    file.close()
    return run.path / artifact.path


class Copies:
    """Makes the copy of one file at a time.

    Args:
        run: Whose files.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._made: tuple[tuple[object, ...], Path] | None = None
        self._removed: weakref.finalize[..., Copies] | None = None

    def have(self, artifact: Artifact) -> bool:
        """Whether there is a file to hand over."""
        return file_of(artifact, self._run) is not None

    def of(self, artifact: Artifact, *, in_place: bool) -> Path | None:
        """A file to hand over; ``None`` where it is no plain file in the run's own folder.

        The copy stays until `drop`, so that a client that has begun to upload it can go on when it is asked
        again; where there is no room for one, it is the file itself.

        Args:
            artifact: What is to be handed over.
            in_place: The client reads it long after, so it must be the file itself.
        """
        file = open_kept(self._run, artifact)
        if file is None:
            return None
        with file:
            copy = None if in_place else self._copy(file, artifact)
        return copy or self._run.path / artifact.path

    def drop(self) -> None:
        """Removes the copy: the tracker has it."""
        self._made = None
        if self._removed is not None:
            self._removed()

    def _copy(self, file: BinaryIO, artifact: Artifact) -> Path | None:
        status = os.fstat(file.fileno())
        known = (artifact.path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._made is not None and self._made[0] == known:
            return self._made[1]
        self.drop()
        try:
            folder = tempfile.mkdtemp(prefix="memlog-")
            self._removed = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / Path(artifact.path).name
            if status.st_size <= shutil.disk_usage(folder).free // _SHARE:
                with path.open("xb") as copy:
                    shutil.copyfileobj(file, copy, _CHUNK)
                self._made = known, path
                return path
        except OSError:
            pass  # no room, after all
        self.drop()
        return None
