"""Names that W&B accepts, and that its charts can be asked for."""

from __future__ import annotations

import hashlib
import re

MAX_KEY = 250
MAX_NAME = 128
MAX_TITLE = 64
"""Characters of a metric's key, of an artifact's name or type, of an alert's title."""

_FOREIGN_IN_KEY = re.compile(r"[^A-Za-z0-9_\-./ ]")
_FOREIGN_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED_TYPES = frozenset({"job", "run_table", "code"})
_RESERVED_PREFIX = "wandb-"
_DIGEST_BYTES = 5


def safe_key(name: str) -> str:
    """A metric's or parameter's key: the same for the same name, which stays as it is where it can.

    A ``*`` would make a glob of it, and keys that begin with ``_`` are W&B's own. A name that had to be
    changed gets a digest of itself, so that two of them don't become one metric.
    """
    cleaned = _FOREIGN_IN_KEY.sub("_", name)
    if cleaned == name and name[:1].isalpha() and len(name) <= MAX_KEY:
        return name
    tail = f"-{_digest(name)}"
    if not cleaned[:1].isalpha():
        cleaned = f"m{cleaned}"
    return cleaned[: MAX_KEY - len(tail)] + tail


def artifact_name(run_id: str, name: str) -> str:
    """The name of a run's artifact: W&B keeps artifacts by project, so the run's id is a part of it."""
    return _safe_name(f"memlog-{run_id}-{name}")


def artifact_type(kind: str) -> str:
    """An artifact's type: its kind, unless W&B keeps that for itself."""
    made = _safe_name(kind)
    taken = made in _RESERVED_TYPES or made.startswith(_RESERVED_PREFIX)
    return f"memlog-{made}" if taken else made


def cut_title(title: str) -> str:
    """An alert's title, cut to what W&B takes."""
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"


def _safe_name(name: str) -> str:
    made = _FOREIGN_IN_NAME.sub("_", name)
    if made == name and len(name) <= MAX_NAME:
        return name
    tail = f"-{_digest(name)}"
    return made[: MAX_NAME - len(tail)] + tail


def _digest(name: str) -> str:
    # A lone surrogate can't be encoded strictly, and a name may come from anywhere.
    return hashlib.blake2s(
        name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
    ).hexdigest()
