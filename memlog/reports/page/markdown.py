"""A report in Markdown, as a part of the page."""

from __future__ import annotations

from xml.etree.ElementTree import Element, fromstring

from markdown_it import MarkdownIt

_HEADINGS = {"h1": "h3", "h2": "h4", "h3": "h5"}
"""New level of each heading. Headings are lowered, because the page has a headline of its own."""


def rendered(text: str) -> Element:
    """Return Markdown as an element. HTML in the text stays text; links and pictures are left out."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    parser.disable(["link", "image", "autolink"])
    safe = "".join(char for char in text if char.isprintable() or char == "\n")
    root = fromstring(f'<div class="prose">{parser.render(safe)}</div>')  # noqa: S314 - markdown-it wrote it: no entity
    for element in root.iter():
        element.tag = _HEADINGS.get(element.tag, element.tag)
    return root
