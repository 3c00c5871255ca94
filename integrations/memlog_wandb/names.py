"""Names that W&B accepts, and that its charts can show."""

from __future__ import annotations

import re

from memlog.sink import distinct_name

MAX_KEY = 250
MAX_NAME = 128
MAX_TITLE = 64
"""Maximum number of characters in an alert's title. `MAX_KEY` is the limit for a metric's key. `MAX_NAME` is
the limit for an artifact's name or type."""

_FOREIGN_IN_KEY = re.compile(r"[^A-Za-z0-9_\-./ ]")
_FOREIGN_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED_TYPES = frozenset({"job", "run_table", "code"})
_RESERVED_PREFIX = "wandb-"


def safe_key(name: str) -> str:
    """Return the key of a metric or parameter. A name that W&B accepts stays as it is.

    In any other name, characters are replaced. The key then ends with a digest of the name, so that two names
    don't become one metric. A ``*`` is replaced, because W&B treats a key with ``*`` as a glob. W&B reserves
    keys that begin with ``_``.
    """
    cleaned = _FOREIGN_IN_KEY.sub("_", name)
    return distinct_name(name, cleaned if cleaned[:1].isalpha() else f"m{cleaned}", MAX_KEY)


def artifact_name(run_id: str, name: str) -> str:
    """Return the name of a run's artifact. The run's id makes the name unique in the project."""
    return _safe_name(f"memlog-{run_id}-{name}")


def artifact_type(kind: str) -> str:
    """Return an artifact's type: its ``kind``, with the prefix ``memlog-`` if W&B reserves that type."""
    made = _safe_name(kind)
    taken = made in _RESERVED_TYPES or made.startswith(_RESERVED_PREFIX)
    return f"memlog-{made}" if taken else made


def cut_title(title: str) -> str:
    """Return an alert's title, cut to the length that W&B takes."""
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"


def _safe_name(name: str) -> str:
    return distinct_name(name, _FOREIGN_IN_NAME.sub("_", name), MAX_NAME)
