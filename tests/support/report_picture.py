"""Pictures of a run's report, light and dark, for the README.

make demo && python tests/support/report_picture.py memlog_runs/RUN docs/images
"""

import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page

from memlog.journal import RunDirectory
from memlog.reports.page import html

WIDTH, HEIGHT = 1440, 900
COLOURS = 255
"""Number of colours of a picture. This makes its file a third as large, with no visible difference."""

Scheme = Literal["light", "dark"]


def take(page: Page, report: Path, scheme: Scheme, picture: Path) -> None:
    """The report's first screen, from the verdict to the categories."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.goto(report.as_uri())
    page.locator(".u-over").first.wait_for()
    page.wait_for_timeout(300)  # the chart is drawn in the next frames
    shown = page.locator("#categories").locator("..").bounding_box()
    assert shown is not None
    end = {"x": 0, "y": 0, "width": WIDTH, "height": shown["y"] + shown["height"] + 20}
    page.screenshot(path=picture, full_page=True, clip=end)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
            picture, optimize=True
        )


def main(run: Path, folder: Path) -> None:
    from support.browser import chromium

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium() as page:
        report = Path(scratch) / "report.html"
        report.write_text(html(RunDirectory(run), announce=print), "utf-8")
        for scheme in ("light", "dark"):
            take(page, report, scheme, folder / f"report-{scheme}.png")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
