"""``memlog open`` as a person sees it: a flame graph in speedscope's own page, in a real browser."""

import gzip
import json
import pickle
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.browser import SOFTWARE_GL, chromium
from support.device_snapshots import training
from support.flamegraphs import document
from support.opened_page import opened, shown_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches speedscope: not installed"),
]

BACKGROUND = "tab => getComputedStyle(tab).backgroundColor"
ODD_NAME = "step 100 #1 & 50%.json.gz"


@pytest.mark.seed(240, 243)
def test_a_flame_graph_is_on_the_page_and_nothing_leaves_the_machine(tmp_path: Path) -> None:
    path = tmp_path / ODD_NAME
    path.write_bytes(gzip.compress(json.dumps(document()).encode()))
    asked: list[str] = []
    errors: list[str] = []
    with opened(path, tmp_path / "cache") as url, chromium(*SOFTWARE_GL) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.goto(url)
        page.get_by_text("live bytes at the peak (in MiB) (1/2)").wait_for()
        assert page.title() == "step 100 - speedscope"
        marked = page.get_by_text("Left Heavy").evaluate(BACKGROUND)
        assert marked != page.get_by_text("Time Order").evaluate(BACKGROUND)
        assert page.get_by_text("Sandwich").evaluate(BACKGROUND) != marked
        page.screenshot(path=tmp_path / "chart.png")
        rows = shown_rows(page)
        page.screenshot(path=tmp_path / "sandwich.png")
    assert errors == []
    assert rows["[activations]"].startswith("4 (57%)")
    assert rows["[parameters]"].startswith("3 (43%)")
    assert "6 (86%)" in rows["encoder.mlp"]
    assert {urlsplit(address).hostname for address in asked if not local(address)} == {"127.0.0.1"}


@pytest.mark.seed(135)
def test_a_snapshot_is_shown_as_a_flame_graph(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(training(), 4))
    with opened(path, tmp_path / "cache") as url, chromium(*SOFTWARE_GL) as page:
        page.goto(url)
        page.get_by_text("Live bytes, device 0 (in MiB) (1/4)").wait_for()
        assert page.title() == f"{path.name} - speedscope"
        rows = shown_rows(page, "head (/src/head.py:2)")
        page.screenshot(path=tmp_path / "snapshot.png")
    assert "8 (" in rows["model (/src/model.py:2)"]
    assert "1 (" in rows["[freed, waiting for another stream]"]


def local(address: str) -> bool:
    """Return True if an address names no server."""
    return address.startswith(("data:", "blob:"))
