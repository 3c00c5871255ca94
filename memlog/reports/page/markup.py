"""HTML as a tree of elements: text is escaped when the tree is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias
from xml.etree.ElementTree import Element, fromstring, tostring

from markdown_it import MarkdownIt

Child: TypeAlias = "Element | str | None"
TableRow: TypeAlias = "Sequence[Child | list[Child]]"
"""Cells of a table's row."""
_HEADINGS = {"h1": "h3", "h2": "h4", "h3": "h5"}
"""New level of each heading of a Markdown text. The page's own headings have the higher levels."""


def el(name: str, /, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Return an element.

    Args:
        name: Name of the element.
        children: Elements and text, in order; ``None`` is left out.
        attributes: Attributes; ``class_`` is written as ``class``, ``aria_label`` as ``aria-label``. ``None``
            and ``False`` are left out, ``True`` is written as an attribute without a value.
    """
    written = {
        key.rstrip("_").replace("_", "-"): "" if value is True else clean(str(value))
        for key, value in attributes.items()
        if value is not None and value is not False
    }
    made = Element(name, written)
    for child in children:
        if child is None or isinstance(child, (str, Element)):
            _append(made, child)
        else:
            for one in child:
                _append(made, one)
    return made


def prose(text: str) -> list[Child]:
    """Return a text as children of an element. Text between backticks becomes a ``code`` element."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is text
        return [text]
    return [el("code", part) if at % 2 else part for at, part in enumerate(parts) if part]


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[TableRow],
    *,
    numbers: Sequence[int] = (),
) -> Element:
    """Return a table in a box that scrolls if it is too wide.

    Screen readers read the caption. The first cell of a row is the row's heading. ``numbers`` are the indices
    of the columns that are aligned to the right.
    """

    def kind(at: int) -> str | None:
        return "number" if at in numbers else None

    head = el(
        "tr", [el("th", text, scope="col", class_=kind(at)) for at, text in enumerate(headings)]
    )
    body = [
        el(
            "tr",
            [
                el(
                    "td" if at else "th",
                    cell,
                    scope=None if at else "row",
                    class_=kind(at),
                )
                for at, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    made = el("table", el("caption", caption), el("thead", head), el("tbody", body))
    return el("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def rendered(text: str) -> Element:
    """Return Markdown as an element. HTML in the text stays text; links and pictures are left out."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.disable(["link", "image", "autolink"])
    safe = "".join(char for char in text if char.isprintable() or char == "\n")
    root = fromstring(f'<div class="prose">{parser.render(safe)}</div>')  # noqa: S314 - markdown-it wrote it: no entity
    for element in root.iter():
        element.tag = _HEADINGS.get(element.tag, element.tag)
    return root


def write(root: Element) -> str:
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def clean(text: str) -> str:
    """Return text with control characters replaced, because text from a journal is untrusted."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _append(parent: Element, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        parent.append(child)
        return
    text = clean(child)
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text
