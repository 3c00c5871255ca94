"""Place of memlog's files among a run's artifacts."""

from __future__ import annotations

from memlog.events import Artifact

FOLDER = "memlog/artifacts"
"""Artifact path with a folder for each kind; the files in it keep their names."""


def folder_of(artifact: Artifact) -> str:
    """Return the artifact path of the folder that ``artifact`` is stored in."""
    return f"{FOLDER}/{artifact.kind}"
