"""Blocks of code in the documentation's pages."""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"


class Block(NamedTuple):
    """A block of code, and the block of text right after it that shows its output."""

    language: str
    code: str
    shown: str | None


def blocks(page: str) -> list[Block]:
    """Blocks of code on a page, in order, each with the block of text that follows it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found: list[Block] = []
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "text":
            found[-1] = found[-1]._replace(shown=code)
        else:
            found.append(Block(language, code, None))
    return found


def masked(text: str) -> list[str]:
    """Return lines without numbers and sources of peaks, which differ between runs and machines."""
    steady = re.sub(r" \((watermark|sampled)\)", "", text)
    return [re.sub(r"[-+]?\d[\d.,]*(e-?\d+)?", "#", line) for line in steady.splitlines()]


def unspaced(text: str) -> list[str]:
    """Lines without numbers and without the widths of columns, which depend on the numbers."""
    return [" ".join(line.split()) for line in masked(text)]
