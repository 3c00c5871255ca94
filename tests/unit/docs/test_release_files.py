"""Files beside the code that a release needs agree with it."""

import re
from pathlib import Path

import memlog

REPOSITORY = Path(__file__).parents[3]


def test_the_citation_has_the_version_of_the_code() -> None:
    text = (REPOSITORY / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [memlog.__version__]
