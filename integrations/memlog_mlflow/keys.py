"""Names that MLflow accepts for metrics and parameters.

MLflow refuses a whole batch if it does not accept one name. Its rules are in ``mlflow/utils/validation.py``:
certain characters, at most 250 of them, and a path that equals its ``posixpath.normpath`` and does not lead
upwards.
"""

from __future__ import annotations

import hashlib
import re

ARTIFACTS = "memlog/artifacts"
"""Artifact path of memlog's files. It has a folder for each kind, in which files keep their names."""
MAX_KEY = 250
"""Maximum number of characters."""

_FOREIGN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_DIGEST_BYTES = 5


def safe_key(name: str) -> str:
    """Return a key that MLflow accepts, always the same for a name.

    An accepted name stays as it is. Any other one is changed, and gets a digest of the original at the end,
    so that two names don't become one metric. Letters outside ASCII are changed, too, although MLflow accepts
    them: each becomes six bytes in JSON, and a request may have at most a million bytes.
    """
    cleaned = _cleaned(name)
    if name and cleaned == name and len(name) <= MAX_KEY:
        return name
    # A lone surrogate can't be encoded strictly, and a name may come from anywhere.
    digest = hashlib.blake2s(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    tail = f"-{digest.hexdigest()}"
    return cleaned[: MAX_KEY - len(tail)] + tail


def _cleaned(name: str) -> str:
    parts = _FOREIGN.sub("_", name).split("/")
    cleaned = "/".join(part for part in parts if part not in {"", ".", ".."})
    # MLflow treats any name with this beginning as a path that leads upwards.
    return f"_{cleaned}" if cleaned.startswith("..") else cleaned
