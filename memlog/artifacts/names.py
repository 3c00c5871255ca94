"""Names of files as a tracker tells them: taken only where no file system can misread one."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""What memlog itself gives; no separator, no leading dot, nothing that steers a terminal."""
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Windows takes these for devices, whatever stands behind the dot."""


def is_safe(name: str) -> bool:
    """Whether a file may be written under ``name``, in a folder, on every system."""
    # Windows drops a dot at the end, so two names would be one.
    return bool(_SAFE.fullmatch(name)) and not name.endswith(".") and not _DEVICE.fullmatch(name)


def numbered(name: str) -> Iterator[str]:
    """``name`` and then, without end, others like it: ``a-1.json``, ``a-2.json``."""
    yield name
    stem, dot, endings = name.partition(".")
    number = 0
    while True:
        number += 1
        yield f"{stem}-{number}{dot}{endings}"
