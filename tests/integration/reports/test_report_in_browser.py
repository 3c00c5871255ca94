"""The report as a person sees it: from a file, and in MLflow's own page, in a real browser."""

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, FrameLocator, Page, Request
from support import child
from support.browser import PUT_AWAY, chromium, newest_run
from support.mlflow_server import running_mlflow_server, sqlite_store
from support.truth import wait_until_delivered

from memlog.journal import RunDirectory, find_run
from memlog.reports.page import html

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integration,
    # A warning of SQLAlchemy 2.1 about MLflow 3.17's own models.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]

STEPS = 40
TRAINING = f"""
    import torch
    from torch import nn

    import memlog

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.head = nn.Linear(64, 8)

        def forward(self, x):
            return self.head(self.encoder(x))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    memlog.init("mlflow", name="report", model=model, layers=True, alerts=["host.rss > 1 MiB"])
    for step in range({STEPS}):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    memlog.finish()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a real run that was delivered, with its report."""
    folder = tmp_path_factory.mktemp("report")
    sqlite_store(folder)
    child.run(
        textwrap.dedent(TRAINING),
        folder,
        MEMLOG_DIR=str(folder / "runs"),
        MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db",
    )
    wait_until_delivered(folder / "runs")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDirectory:
    return find_run(folder / "runs", "latest")


@pytest.fixture(scope="module")
def report(folder: Path, run: RunDirectory) -> Path:
    """The report in a file, made as the command makes it, with uPlot."""
    path = folder / "report.html"
    path.write_text(html(run, announce=print), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as page:
        assert page.context.browser is not None
        yield page.context.browser


@contextlib.contextmanager
def opened(
    browser: Browser,
    report: Path,
    *,
    width: int = 1440,
    scheme: Literal["light", "dark"] = "light",
    scripts: bool = True,
) -> Iterator[Page]:
    """Show the report's file in a window. Fail if its script has an error or if the page sends a request."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
    )
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))
    page.on("request", lambda request: troubles.extend(foreign(request, report)))
    page.goto(report.as_uri())
    yield page
    assert troubles == []
    context.close()


def foreign(request: Request, report: Path) -> list[str]:
    return [] if request.url == report.as_uri() else [request.url]


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width


@pytest.mark.parametrize("width", [360, 600, 900, 1280])
def test_no_column_of_the_layers_is_outside_the_page(
    browser: Browser, report: Path, tmp_path: Path, width: int
) -> None:
    """Layers often have long paths."""
    path = tmp_path / "long.html"
    text = report.read_text("utf-8")
    assert "<code>encoder.0</code>" in text
    long = "model.language_model.transformer_encoder.layers.11.feed_forward_network"
    path.write_text(text.replace("<code>encoder.", f"<code>{long}."), "utf-8")
    with opened(browser, path, width=width) as page:
        box = page.locator(".scroll", has=page.get_by_text("The largest layers", exact=True))
        assert box.evaluate("box => box.scrollWidth - box.clientWidth") == 0
        assert overflow(page) == 0


def test_the_chart_zooms_by_mouse_and_by_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        plot = page.locator("#figure-host .u-over")
        chart = page.locator("#figure-host .live")
        assert chart.get_attribute("data-shown") == f"0-{STEPS - 1}"
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 60)
        assert "step 10" in page.locator("#figure-host .tip").inner_text()
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
        page.mouse.up()
        first, last = map(int, (chart.get_attribute("data-shown") or "").split("-"))
        assert (first, last) in {(9, 19), (10, 19), (10, 20), (9, 20)}
        page.get_by_role("button", name="Whole run").click()
        assert chart.get_attribute("data-shown") == f"0-{STEPS - 1}"
        chart.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("+")
        assert chart.get_attribute("data-shown") != f"0-{STEPS - 1}"
        page.keyboard.press("Escape")
        assert chart.get_attribute("data-shown") == f"0-{STEPS - 1}"


def explore_layers(page: Page | FrameLocator) -> None:
    """Search the icicle, zoom into a layer, and go back."""
    encoder = page.locator('#icicle [data-name="encoder"]')
    box = encoder.locator("rect").bounding_box()
    whole = page.locator("#icicle svg").bounding_box()
    assert box is not None
    assert whole is not None
    assert box["width"] < whole["width"] - 5
    page.locator("#find").fill("encoder")
    assert "1 found: " in page.locator("#found").inner_text()
    assert page.locator('#icicle [data-name="head"]').get_attribute("class") == "layer faint"
    page.locator("#find").fill("")
    encoder.click()
    zoomed = encoder.locator("rect").bounding_box()
    assert zoomed is not None
    assert zoomed["width"] == pytest.approx(whole["width"], abs=1)
    assert page.locator('#icicle [data-name="head"]').count() == 0
    page.get_by_role("button", name="Whole model").click()
    assert page.locator('#icicle [data-name="head"]').count() == 1


def test_the_icicle_zooms_and_finds(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        explore_layers(page)
        page.locator('#icicle [tabindex="0"]').focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert page.locator("#icicle-status").inner_text().startswith("Net / encoder")
        page.keyboard.press("Enter")
        assert page.locator('#icicle [data-name="head"]').count() == 0
        page.keyboard.press("Escape")
        assert page.locator('#icicle [data-name="head"]').count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (600, "dark")])
def test_nothing_is_cut_off(
    browser: Browser, report: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    with opened(browser, report, width=width, scheme=scheme) as page:
        assert overflow(page) == 0
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


def test_without_scripts_there_are_tables_and_drawings(browser: Browser, report: Path) -> None:
    with opened(browser, report, scripts=False) as page:
        assert overflow(page) == 0
        rows = page.locator("#figure-host table tbody tr")
        assert rows.count() >= 10
        assert rows.first.is_visible()
        assert page.locator("#figure-host svg.static").is_visible()
        assert page.locator("noscript p").is_visible()


def test_mlflow_shows_it_in_place(
    folder: Path, run: RunDirectory, browser: Browser, tmp_path: Path
) -> None:
    """MLflow shows the file that the run itself uploaded, in a sandbox without storage or origin."""
    assert (run.artifacts / "report.html").stat().st_size > 20_000
    uri = f"sqlite:///{folder}/mlflow.db"
    experiment, run_id = newest_run(uri)
    with running_mlflow_server(tmp_path, uri) as server:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.set_default_timeout(90_000)
        page.add_init_script(PUT_AWAY)
        path = "memlog/artifacts/report/report.html"
        page.goto(f"{server.url}/#/experiments/{experiment}/runs/{run_id}/artifacts/{path}")
        frame = page.frame_locator("iframe[sandbox='allow-scripts']")
        frame.locator("h1").wait_for()
        explore_layers(frame)
        frame.locator("summary", has_text="As a table").first.click()
        assert frame.locator("#figure-host table tbody tr").first.is_visible()
        context.close()
