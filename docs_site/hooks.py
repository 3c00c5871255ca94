"""Hooks of mkdocs: pages that are generated, links that leave docs/, and missing docstrings."""

from __future__ import annotations

import inspect
import logging
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

from docs_site import document_tables, mermaid
from docs_site.settings_table import table
from memlog.cli.main import COMMANDS, command_named

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# mkdocs counts the warnings of loggers whose names begin with "mkdocs".
_LOG = logging.getLogger("mkdocs.hooks.memlog")

PAGES = {
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/integrations.md": "integrations/README.md",
    "project/insight-benchmark.md": "benchmarks/insight/README.md",
    "project/cuda-runtime.md": "tests/cuda_runtime/README.md",
}
"""Pages made of files outside docs/."""

API = ("memlog", "memlog.compat.memory_monitor", "memlog.events", "memlog.sink", "memlog.testing")
"""Modules whose public names the reference shows."""

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
_SOURCE = re.compile(r'src(?:set)?="([^"]+)"')
_ALTERNATIVE = re.compile(r'alt="([^"]*)"')


def on_startup(**_: Any) -> None:
    """Format the commands' help: unwrapped lines as code blocks, and names of pages as links."""
    for name in COMMANDS:
        command = command_named(name)
        help_text = inspect.cleandoc(command.help or "")
        help_text = re.sub(r"\bdocs/\s*([\w-]+)\.md", r"[\1](../\1.md)", help_text)
        command.help = re.sub(r"^\x08\n((?:.+\n?)+)", _code_block, help_text, flags=re.MULTILINE)


def _code_block(match: re.Match[str]) -> str:
    return f"```sh\n{match[1].rstrip()}\n```\n"


def on_pre_build(**_: Any) -> None:
    """Warn of each public name without a docstring; in a strict build a warning is an error."""
    for path in undocumented():
        _LOG.warning("%s has no docstring", path)


def undocumented() -> Iterator[str]:
    """Return the public classes, functions and properties that have no docstring."""
    for name in API:
        module = package()[name.partition(".")[2]] if "." in name else package()
        for member in (module[public] for public in exported(module)):
            yield from _undocumented_in(member)


def exported(module: griffe.Object | griffe.Alias) -> list[str]:
    """Return the public names of a module: its ``__all__``, or the names that it defines itself."""
    if module.exports is not None:
        return [str(name) for name in module.exports if str(name) in module.members]
    own = (name for name, member in module.members.items() if not member.is_alias)
    return [name for name in own if not name.startswith("_")]


def _undocumented_in(thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    if thing.is_attribute and "property" not in thing.labels:
        return
    if not thing.has_docstring:
        yield thing.path
    if thing.is_class:
        for name, member in thing.members.items():
            if not (name.startswith("_") or member.is_alias):
                yield from _undocumented_in(member)


@cache
def package() -> griffe.Module:
    """Return the package memlog, which griffe reads without importing it."""
    found = griffe.load("memlog", search_paths=[str(ROOT)])
    assert isinstance(found, griffe.Module)  # noqa: S101 - for the type
    return found


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add pages made of files outside docs/, a page for each program that pages link to, and Mermaid."""
    for target, source in PAGES.items():
        files.append(_generated(config, target, (ROOT / source).read_text(encoding="utf-8")))
    for program in _linked_programs(config):
        files.append(_generated(config, _page_of(program), _source_page(program)))
    if (library := mermaid.folder()) is not None:
        for name in mermaid.FILES:
            files.append(_generated(config, f"mermaid/{name}", (library / name).read_text("utf-8")))
    return files


def _generated(config: MkDocsConfig, path: str, content: str) -> File:
    from mkdocs.structure.files import File  # noqa: PLC0415 - the table needs no mkdocs

    return File.generated(config, path, content=content)


def _linked_programs(config: MkDocsConfig) -> list[str]:
    """Return the files and folders of examples/ to which pages link, relative to the repository."""
    found = set()
    for page in Path(config.docs_dir).rglob("*.md"):
        for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(page.relative_to(ROOT).parent, target))
            if path.startswith("examples/") and (ROOT / path).exists():
                found.add(path)
    return sorted(found)


def _page_of(program: str) -> str:
    return f"project/{program}.md"


def _source_page(program: str) -> str:
    """Return a page that shows a program, or all programs of a folder."""
    path = ROOT / program
    parts = [f"# {program}\n"]
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        if path.is_dir():
            parts.append(f"## {file.name}\n")
        parts.append(f"````python\n{file.read_text(encoding='utf-8').rstrip()}\n````\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Fill in tables, correct links that leave docs/, and prepare pictures and diagrams."""
    markdown = markdown.replace("<!-- the table of settings -->", table(package()))
    markdown = document_tables.filled(markdown, package())
    markdown = _PICTURE.sub(_by_scheme, markdown)
    markdown = mermaid.prepare(
        markdown, posixpath.relpath(".", posixpath.dirname(page.file.src_uri))
    )
    return _LINK.sub(lambda link: _mended(link, page.file.src_uri), markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Write a page's Markdown beside it: agents follow the links of docs/llms.txt to the Markdown."""
    source = Path(config.site_dir) / page.file.src_uri
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(page.markdown or "", encoding="utf-8")
    return output


def _mended(link: re.Match[str], page: str) -> str:
    """Return a link of a page with its target on the site."""
    source = PAGES.get(page)
    place = posixpath.dirname(source) if source else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(place, link[1]))
    pages = {**{file: name for name, file in PAGES.items()}, "README.md": "index.md"}
    if path.startswith("examples/"):
        target = _page_of(path)
    elif path in pages:
        target = pages[path]
    elif path.startswith("docs/"):
        target = path.removeprefix("docs/")
    else:
        return link[0]
    return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{link[2] or ''})"


def _by_scheme(picture: re.Match[str]) -> str:
    """Return a ``<picture>`` as two Markdown images. Its ``<source>`` is the dark one, and comes first."""
    dark, light = _SOURCE.findall(picture[0])
    alternative = _ALTERNATIVE.findall(picture[0])[0]
    return f"![{alternative}]({light}#only-light)![{alternative}]({dark}#only-dark)"
