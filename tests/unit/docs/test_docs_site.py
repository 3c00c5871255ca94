"""Additions of the site's build to mkdocs: missing docstrings, links out of docs/, and the chart."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.journals import GIB, MadeRun, at, batch

from memlog.events import End
from memlog.reports import encode, summarize
from memlog.reports.schema import Summary

griffe = pytest.importorskip("griffe", reason="griffe is not installed: dependency group `docs`")

from docs_site import document_tables, hooks, mermaid, overhead_chart  # noqa: E402 - need griffe

ROOT = Path(__file__).parents[3]


def mended(text: str, page: str) -> str:
    return hooks.on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)))


@pytest.mark.seed(31)
@pytest.mark.slow
def test_everything_public_has_a_docstring() -> None:
    assert list(hooks.undocumented()) == []


def test_a_public_name_without_a_docstring_is_found(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        '__all__ = ["Known", "unknown"]\n\nclass Known:\n    """Known."""\n'
        "    def method(self): ...\n    def _own(self): ...\n\ndef unknown(): ...\n"
    )
    module = griffe.load("bare", search_paths=[str(tmp_path)])
    found = [
        path for name in hooks.exported(module) for path in hooks._undocumented_in(module[name])
    ]
    assert found == ["bare.Known.method", "bare.unknown"]


def test_a_missing_docstring_fails_a_strict_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning must come from a logger of mkdocs, because a strict build counts only these."""
    monkeypatch.setattr(hooks, "undocumented", lambda: iter(["memlog.init"]))
    hooks.on_pre_build()
    [record] = caplog.records
    assert record.name.startswith("mkdocs.")
    assert (record.levelname, record.getMessage()) == ("WARNING", "memlog.init has no docstring")


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("project/hyco.md", "../../examples/hyco", "examples/hyco.md"),
        ("how-to/a.md", "../../CHANGELOG.md#x", "../project/changelog.md#x"),
        ("project/contributing.md", "docs/how-it-works.md", "../how-it-works.md"),
        ("index.md", "https://a.b/c.md", "https://a.b/c.md"),
        ("saving.md", "#here", "#here"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, expected: str) -> None:
    assert mended(f"[a]({link})", page) == f"[a]({expected})"


DOCUMENTS = [
    path
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for path in document_tables.MARK.findall(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_each_field_of_a_document_has_a_meaning(path: str) -> None:
    module, _, name = path.rpartition(".")
    struct = getattr(importlib.import_module(module), name)
    rows = list(document_tables.fields(struct, hooks.package()))
    assert [row.name for row in rows if not row.meaning] == []
    page = mended(f"<!-- the fields of {path} -->", "index.md")
    assert all(f"| `{row.name}` | {row.type} | {row.meaning}" in page for row in rows)


def paths(document: object, known: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the paths of a JSON document's values, with ``<name>`` in place of keys that vary."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            path = f"{prefix}.{key}".lstrip(".")
            is_fixed = any(f"{name}.".startswith((f"{path}.", f"{path}[]")) for name in known)
            yield from paths(value, known, path if is_fixed else f"{prefix}.<name>")
    elif isinstance(document, list) and document and isinstance(document[0], dict):
        yield from paths(document[0], known, f"{prefix}[]")
    elif document or document in (0, False, None):
        yield prefix


def test_the_table_of_show_has_every_field_of_a_run(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(batch(0, GIB), batch(1, GIB), End(at(2), "finished")).closed()
    rows = document_tables.fields(Summary, hooks.package())
    known = {row.name for row in rows}
    document = json.loads(encode(summarize(run)))
    found = set(paths(document, known))
    assert found <= known
    assert {"peaks.<name>.bytes", "metrics.<name>.last", "health.published"} <= found


def test_a_picture_follows_the_sites_scheme() -> None:
    picture = '<picture><source srcset="d.svg"><img alt="A" src="l.svg"></picture>'
    assert mended(picture, "index.md") == "![A](l.svg#only-light)![A](d.svg#only-dark)"


def test_a_diagram_is_text_if_mermaid_can_not_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the theme would load mermaid from another server."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mermaid.folder.cache_clear()
    try:
        assert mended("```mermaid\na --> b\n```", "index.md") == "```text\na --> b\n```"
    finally:
        mermaid.folder.cache_clear()


def test_the_chart_shows_the_figures_of_the_benchmarks() -> None:
    """``python -m docs_site.overhead_chart`` draws the chart again."""
    for scheme, colors in overhead_chart.SCHEMES.items():
        drawn = (ROOT / "docs" / "images" / f"overhead-{scheme}.svg").read_text(encoding="utf-8")
        assert drawn == overhead_chart.draw(colors)
    recording, layers = overhead_chart.panels()
    assert {bar.label for bar in recording.bars} >= {"memlog, MLflow", "wandb.log"}
    assert {bar.label for bar in layers.bars} >= {"memlog, layers=True", "torch's MemTracker"}


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_begins_with_code() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert len(README.split()) <= 800
    assert any(line.startswith("```python") for line in lines[:15])


def test_the_readmes_links_lead_somewhere() -> None:
    links = re.findall(r"(?:\]\(|src(?:set)?=\")(?!https?:)([^)\"#]+)(#[^)\"]+)?", README)
    assert len(links) > 20
    for target, anchor in links:
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\s-]", "", one.lower()).replace(" ", "-") for one in headings}
            assert anchor[1:] in slugs, target + anchor
