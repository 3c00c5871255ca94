"""The gallery shows the reports that ``make gallery`` makes, and each loads nothing."""

import re
from pathlib import Path

import pytest

from docs_site.gallery import DOCS, REPORTS

GALLERY = DOCS / "gallery"
LARGEST = 400_000


def test_the_page_shows_every_report() -> None:
    page = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r'<iframe class="report" src="([\w-]+)\.html"', page)) == set(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_there_and_loads_nothing(name: str) -> None:
    path: Path = GALLERY / f"{name}.html"
    report = path.read_text(encoding="utf-8")
    assert len(report) < LARGEST
    assert "default-src &#x27;none&#x27;" in report or "default-src 'none'" in report
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"https?:", report) == []
