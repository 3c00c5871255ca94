"""Griffe extension that converts docstrings to Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LITERAL_MARK = re.compile(r"^(.*?):?:: *$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Replace ``::`` at the end of a line, the mark of a literal block, by ``:``. Markdown needs no mark."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL_MARK.sub(_introduction, obj.docstring.value)


def _introduction(match: re.Match[str]) -> str:
    return f"{match[1]}:" if match[1] else ""
