"""Where memlog's files stand among a run's artifacts."""

from __future__ import annotations

from memlog.events import Artifact

FOLDER = "memlog/artifacts"
"""Below it one folder for each kind, in which the files bear their own names."""


def folder_of(artifact: Artifact) -> str:
    """The artifact path below which ``artifact`` is stored."""
    return f"{FOLDER}/{artifact.kind}"
