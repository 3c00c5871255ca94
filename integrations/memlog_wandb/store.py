"""Download of memlog's artifacts from W&B."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from memlog._internal.connections import RATE, watched
from memlog.errors import MemlogError, TrackerRejectedError, UnknownRunError
from memlog.sink import Connection, StoredArtifact
from memlog_wandb.addresses import RunPath, offline_folder, run_path
from memlog_wandb.contents import METADATA
from memlog_wandb.environment import DIR
from memlog_wandb.errors import LOG_IN, translated, unavailable
from memlog_wandb.probe import probe

_QUIET = 2.0
"""Seconds to wait for the next byte before memlog checks the server. wandb would retry for hours."""
_PATIENCE = 60.0
"""Maximum seconds to wait for a download's next byte, even if the server can be reached."""
_API_TIMEOUT = 20
"""Maximum seconds that W&B's client waits for an answer."""


class WandbStore:
    """A `memlog.sink.ArtifactStore` for W&B. Its methods raise the errors that `ArtifactStore` names.

    Callers name a run by its id, its path, or its address.

    Args:
        connection: How to reach W&B. `open_store` has already set ``connection.environment``. If
            ``connection.uri`` names the run, an entity and a project in ``connection.uri`` override those in
            environment variables.
    """

    def __init__(self, connection: Connection) -> None:
        self._environment = connection.environment
        self._known = run_path(connection.uri) if connection.uri else RunPath(None, None, "")
        self._offline = offline_folder(connection.uri)
        self._api: Any = None

    def list_artifacts(self, run_id: str) -> list[StoredArtifact]:
        """Return the newest version of each file that memlog stored in the run."""
        return [stored for stored, _ in self._found(run_id)]

    def fetch(
        self,
        run_id: str,
        artifact: StoredArtifact,
        directory: Path,
        progress: Callable[[int], object],
    ) -> Path:
        """Download one file to ``directory / artifact.name``."""
        for stored, version in self._found(run_id):
            if (stored.name, stored.kind) == (artifact.name, artifact.kind):
                with translated():
                    return _download(version, artifact.name, directory, progress)
        raise TrackerRejectedError(
            f"the W&B run {run_id} has no artifact {artifact.name!r}: `memlog show` lists its files"
        )

    def _found(self, run_id: str) -> list[tuple[StoredArtifact, Any]]:
        try:
            return self._asked(run_id)
        except MemlogError as error:
            if self._offline is None:
                raise
            reason = "" if LOG_IN in str(error) else f" ({error})"
            raise UnknownRunError(
                f"run {run_id} was recorded offline, and W&B can't give its files{reason}: omit --backend "
                f"to get them from this machine, or call `wandb sync {self._offline}` first"
            ) from error

    def _asked(self, run_id: str) -> list[tuple[StoredArtifact, Any]]:
        probe(wandb.setup().settings.base_url)  # without it wandb would try for a long time
        with translated(), _folders_elsewhere():
            if self._api is None:
                self._api = wandb.Api(timeout=_API_TIMEOUT)
            run = self._api.run(self._path(run_id))
            found = {}
            # The oldest comes first, so a newer version replaces it.
            for version in run.logged_artifacts():
                name = version.metadata.get(METADATA)
                if isinstance(name, str) and Path(name).name == name:
                    kind = str(version.metadata.get("memlog_kind", version.type))
                    found[name, kind] = (StoredArtifact(name, kind, version.size), version)
        return list(found.values())

    def _path(self, run_id: str) -> str:
        path = run_path(run_id)
        known = self._known if self._known.run_id == path.run_id else RunPath(None, None, "")
        environment = {**os.environ, **self._environment}
        return str(
            path._replace(
                entity=path.entity or known.entity or environment.get("WANDB_ENTITY"),
                project=path.project
                or known.project
                or environment.get("WANDB_PROJECT")
                or "uncategorized",
            )
        )


@contextmanager
def _folders_elsewhere() -> Iterator[None]:
    """Let W&B's client create its folders in a temporary folder."""
    before = os.environ.get(DIR)
    with tempfile.TemporaryDirectory(prefix="memlog-wandb-") as scratch:
        os.environ[DIR] = scratch
        try:
            yield
        finally:
            if before is None:
                del os.environ[DIR]
            else:
                os.environ[DIR] = before


def _download(version: Any, name: str, directory: Path, progress: Callable[[int], object]) -> Path:
    """Download one file, and raise if the server stops answering or is too slow."""

    def download() -> None:
        version.download(root=str(directory), path_prefix=name, skip_cache=True)

    watched(download, directory, progress, _Patience().check)
    file = directory / name
    if file.resolve().parent != directory.resolve() or not file.is_file():
        raise TrackerRejectedError(f"the artifact {version.name!r} has no file {name!r}")
    return file


class _Patience:
    """Time limits on a download, because W&B's client has none."""

    def __init__(self) -> None:
        self._begun = self._received = self._asked = time.monotonic()
        self._arrived = 0

    def check(self, arrived: int) -> None:
        """Raise if the download is too slow, or if the server no longer answers.

        ``arrived`` is the number of bytes that have arrived so far.
        """
        now = time.monotonic()
        if arrived > self._arrived:
            self._arrived, self._received, self._asked = arrived, now, now
        if now - self._received >= _PATIENCE:
            raise unavailable(f"nothing has arrived for {_PATIENCE:g} s")
        if now - self._begun >= _PATIENCE + arrived / RATE:
            raise unavailable(f"only {arrived:,} bytes have arrived in {now - self._begun:.0f} s")
        if now - self._asked >= _QUIET:
            probe(wandb.setup().settings.base_url)
            self._asked = now
