"""The page of promises names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_proves_a_promise_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`((?:tests|memlog)/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 70
    for path, name in named:
        assert re.search(rf"^ *(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            name
        )
