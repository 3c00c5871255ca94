"""docs/llms.txt, the list of pages for agents in the format of llmstxt.org."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TEXT = (DOCS / "llms.txt").read_text(encoding="utf-8")
LINKS = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.+)$", TEXT, re.MULTILINE)


def test_it_has_the_parts_of_the_format_in_order() -> None:
    title, _, summary, *rest = TEXT.splitlines()
    assert title == "# memlog"
    assert summary.startswith("> ")
    sections = [line for line in rest if line.startswith("#")]
    assert sections == ["## Get started", "## How-to", "## Reference", "## Optional"]
    lists = TEXT.partition("## ")[2].splitlines()
    entries = [line for line in lists if line.startswith("- ")]
    assert len(entries) == len(LINKS) > 40


def test_every_link_leads_to_a_page() -> None:
    for name, target, _ in LINKS:
        page = DOCS / target
        assert page.with_suffix(".md").is_file(), name
        # Such a page is made of the code, so its Markdown says little.
        is_of_the_code = "\n::: " in page.with_suffix(".md").read_text(encoding="utf-8")
        assert page.suffix == (".html" if is_of_the_code else ".md"), name


def test_no_page_for_users_is_missing() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    for_users = navigation.partition("  - Get started:\n")[2].partition("  - How it works:\n")[0]
    pages = set(re.findall(r": ([\w/-]+\.md)$", for_users, re.MULTILINE))
    assert len(pages) > 30
    assert pages <= {target.replace(".html", ".md") for _, target, _ in LINKS}
