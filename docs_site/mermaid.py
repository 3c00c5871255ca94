"""The library that draws the pages' Mermaid diagrams, served by the site itself."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

from memlog._internal.npm_package import LICENSES, FetchError, NpmPackage

MERMAID = NpmPackage(
    name="mermaid",
    version="11.17.2",  # mkdocs-material works with Mermaid 11
    integrity="sha512-V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
    files=re.compile(r"package/dist/(mermaid\.min\.js)"),
    needed="mermaid.min.js",
)
FILES = (MERMAID.needed, LICENSES)
_LOG = logging.getLogger("mkdocs.hooks.memlog")


@cache
def folder() -> Path | None:
    """Return the folder of `FILES`. If they can't be fetched, log the reason and return ``None``."""
    try:
        return MERMAID.find(_LOG.info)
    except (FetchError, OSError) as error:
        # Not a warning, which would fail a strict build: the site can be built without a network.
        _LOG.info("diagrams are shown as text, because Mermaid is missing: %s", error)
        return None


def prepare(markdown: str, to_root: str) -> str:
    """Add the library to a page that has diagrams; without the library, show the diagrams' text.

    Args:
        markdown: Text of the page.
        to_root: Relative path from the page to the site's root.
    """
    if "```mermaid\n" not in markdown:
        return markdown
    if folder() is None:
        # Otherwise the theme would load Mermaid from another server.
        return markdown.replace("```mermaid\n", "```text\n")
    return f'{markdown}\n\n<script src="{to_root}/mermaid/{MERMAID.needed}"></script>\n'
