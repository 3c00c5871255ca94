"""Names that MLflow accepts for metrics and parameters.

One name that it does not accept makes it refuse the whole batch. Its rules stand in
``mlflow/utils/validation.py``: certain characters, at most 250 of them, and a path that is its own
``posixpath.normpath`` and does not lead upwards.
"""

from __future__ import annotations

import hashlib
import re

MAX_KEY = 250
"""Characters."""

_FOREIGN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_DIGEST_BYTES = 5


def safe_key(name: str) -> str:
    """A key that MLflow accepts, the same for the same name.

    A name that is fine stays as it is. Any other gets a digest of itself at the end, so that two
    names that differ only in what had to go don't become one metric. Letters are ASCII only: MLflow
    takes others too, but in JSON each becomes six bytes, and a request may hold a million.
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
    # MLflow takes any name that begins so for one that leads upwards.
    return f"_{cleaned}" if cleaned.startswith("..") else cleaned
