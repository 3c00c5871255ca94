"""The documentation's site builds without a warning, and its pages fetch nothing from other servers."""

import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from support.browser import chromium

pytest.importorskip("mkdocs", reason="mkdocs is not installed: dependency group `docs`")
pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it; any warning fails."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(site))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def html(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_of_docs_is_on_the_site(site: Path) -> None:
    pages = {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in ROOT.glob("docs/**/*.md")}
    assert pages <= {str(page.relative_to(site).with_suffix("")) for page in html(site)}


def test_agents_find_every_page_of_their_list(site: Path) -> None:
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", listed)
    assert len(targets) > 40
    assert [target for target in targets if not (site / target).is_file()] == []
    page = (site / "how-to" / "find-a-leak.md").read_text(encoding="utf-8")
    assert page.startswith("# Find a leak")


def test_pages_ask_nobody_but_their_server_for_anything(served: str, browser: Page) -> None:
    asked: list[str] = []
    browser.on("request", lambda request: asked.append(request.url))
    for name in ("index", "how-it-works", "reference/api"):
        browser.goto(f"{served}/{name}.html")
        browser.wait_for_load_state("networkidle")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((served, "data:", "blob:"))] == []


def test_the_road_of_an_event_is_drawn(served: str, browser: Page) -> None:
    browser.goto(f"{served}/how-it-works.html")
    if browser.locator("code.language-text").count():
        pytest.skip("the site was built without Mermaid: npm or its registry is missing")
    drawing = browser.locator("div.mermaid")
    drawing.wait_for()
    size = drawing.bounding_box()
    assert size is not None
    assert size["height"] > 400


def test_the_search_finds_a_setting(served: str, browser: Page) -> None:
    browser.goto(f"{served}/index.html")
    browser.keyboard.press("/")
    browser.keyboard.type("journal_limit")
    found = browser.locator(".md-search-result__link").first
    found.wait_for()
    assert "settings" in (found.get_attribute("href") or "")


@pytest.mark.parametrize("width", [600, 1440])
def test_no_page_is_wider_than_the_window(served: str, browser: Page, width: int) -> None:
    browser.set_viewport_size({"width": width, "height": 900})
    for name in (
        "index",
        "costs",
        "reference/settings",
        "reference/commands",
        "project/benchmarks-layers",
    ):
        browser.goto(f"{served}/{name}.html")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name


def test_commands_and_settings_are_those_of_the_code(site: Path) -> None:
    from memlog.cli.main import COMMANDS, command_named
    from memlog.settings import Settings

    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        command = command_named(name)
        assert command.name == name
        assert f'id="memlog-{name}"' in commands
        for option in command.params:
            assert all(text in commands for text in option.opts if text.startswith("-"))
    table = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    shown = set(re.findall(r"<tr>\s*<td><code>(\w+)</code>", table))
    fields = set(Settings.__struct_fields__) - {"backends", "directory"}
    assert shown == fields | {"backend", "dir", "model", "on_alert", "config"}


def test_the_api_has_every_public_name(site: Path) -> None:
    import memlog

    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="memlog\.(?:\w+\.)*(\w+)"', page))
    assert set(memlog.__all__) - {"__version__"} <= shown
