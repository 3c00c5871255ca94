"""Names that MLflow accepts for metrics and parameters.

MLflow refuses a whole batch if one name in the batch is invalid. MLflow's rules are in
``mlflow/utils/validation.py``. A name has at most 250 characters, and may contain only certain characters. A
name must equal ``posixpath.normpath(name)``, and must not lead to a parent folder.
"""

from __future__ import annotations

import re

from memlog.sink import distinct_name

ARTIFACTS = "memlog/artifacts"
"""Artifact path of memlog's files. There is one folder for each kind of file. Files keep their names."""
MAX_KEY = 250
"""Maximum number of characters of a key. A longer key is cut."""

_FOREIGN = re.compile(r"[^A-Za-z0-9_\-. :/]")


def safe_key(name: str) -> str:
    """Return a key that MLflow accepts. The same name always gives the same key.

    An ASCII name that MLflow accepts stays as it is. In any other name, characters are replaced. The key then
    ends with a digest of the name, so that two names don't become one metric. Letters outside ASCII are
    replaced, too, although MLflow accepts them. Each would take six bytes in JSON, and a request may have at
    most a million bytes.
    """
    return distinct_name(name, _cleaned(name), MAX_KEY)


def _cleaned(name: str) -> str:
    parts = _FOREIGN.sub("_", name).split("/")
    cleaned = "/".join(part for part in parts if part not in {"", ".", ".."})
    # MLflow treats any name with this beginning as a path that leads upwards.
    return f"_{cleaned}" if cleaned.startswith("..") else cleaned
