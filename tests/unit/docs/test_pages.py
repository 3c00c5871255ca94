"""The pages together: what they repeat of each other, and their length."""

from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
MOST_WORDS = 35_000
"""Words that a user has to search through; pages about memlog itself and the gallery are apart."""


def test_the_pages_for_users_are_short() -> None:
    pages = [
        path
        for path in sorted(DOCS.rglob("*.md"))
        if path.relative_to(DOCS).parts[0] not in ("project", "gallery")
    ]
    assert len(pages) > 40
    words = {
        str(path.relative_to(DOCS)): len(path.read_text(encoding="utf-8").split()) for path in pages
    }
    longest = sorted(words, key=lambda name: -words[name])[:5]
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())}: {longest}"


def test_the_guide_to_failures_shows_lines_that_are_tested() -> None:
    """``test_out_of_memory_cuda.py`` compares the whole lines of the other page."""
    tested = rows_below("| what ran out", "project/out-of-memory.md")
    shown = rows_below("| what ran out", "how-to/read-an-out-of-memory-report.md")
    assert len(tested) > len(shown) > 3
    for cause, line in shown.items():
        assert tested[cause].endswith(f" requested: {line}"), cause


def rows_below(heading: str, page: str) -> dict[str, str]:
    """Return the second cells of a table by the first."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}")[2]
    rows = [line[2:-2].split(" | ") for line in text.splitlines()[2:] if line.startswith("| ")]
    return {row[0]: row[1] for row in rows}
