"""Regular expressions that are compiled on first use. Compiling takes up to a millisecond for each."""

from __future__ import annotations

import re
from typing import Any, cast


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern as `re.compile` does, but compile it when it is used first."""
    return cast("re.Pattern[str]", _Pattern(text, flags))


class _Pattern:
    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(self._text, self._flags), name)  # `re` keeps compiled patterns
        setattr(self, name, found)
        return found
