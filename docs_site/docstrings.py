"""A griffe extension: docstrings as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LITERAL_MARK = re.compile(r"^(.*?):?:: *$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turns the mark of a literal block, which Markdown does not know, into what introduces the block."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL_MARK.sub(_introduction, obj.docstring.value)


def _introduction(match: re.Match[str]) -> str:
    return f"{match[1]}:" if match[1] else ""
