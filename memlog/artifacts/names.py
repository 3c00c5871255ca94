"""Check the names of files that a tracker lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Pattern of safe file names: no path separator, no leading dot, no control character. All file names that
memlog makes match this pattern."""


def is_safe(name: str) -> bool:
    return bool(_SAFE.fullmatch(name))


def numbered(name: str) -> Iterator[str]:
    """Yield ``name``, then numbered names without end: ``a.json``, ``a-1.json``, ``a-2.json``, …."""
    yield name
    stem, dot, endings = name.partition(".")
    for number in itertools.count(1):
        yield f"{stem}-{number}{dot}{endings}"
