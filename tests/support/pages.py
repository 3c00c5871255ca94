"""Blocks of code in the documentation's pages."""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"


class Block(NamedTuple):
    """A block, and the block of text right behind it, which shows its output."""

    language: str
    code: str
    shown: str | None


def blocks(page: str) -> list[Block]:
    """A page's blocks in order, those of text with the block before them."""
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
