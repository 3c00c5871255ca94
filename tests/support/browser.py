"""Pages in a real browser: for tests of their content, and for the picture of MLflow's page.

python tests/support/browser.py sqlite:////absolute/path/mlflow.db docs/images/mlflow-demo.png
"""

import contextlib
import gc
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PAGE_TIMEOUT_MS = 90_000
# Chromium's own calls home fail on a machine without internet, many at a time.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SOFTWARE_GL = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
"""Options with which a page can draw with WebGL on a machine without a GPU."""


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Page]:
    """A page in Debian's Chromium."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "this needs Chromium: apt-get install chromium"
    others = _running()
    with sync_playwright() as playwright:
        drivers = [process for process in _running() if process not in others]
        browser = playwright.chromium.launch(executable_path=path, args=[*CHROMIUM_FLAGS, *flags])
        page = browser.new_page(viewport={"width": 1440, "height": 820})
        page.set_default_timeout(PAGE_TIMEOUT_MS)
        yield page
        browser.close()
    # Playwright's event loop can end before its driver does. Python would then print a warning.
    for driver in drivers:
        driver.wait(timeout=60)


def _running() -> list["subprocess.Popen[bytes]"]:
    found = (one for one in gc.get_objects() if type(one) is subprocess.Popen)
    return [process for process in found if process.returncode is None]


# On the first visit, the page opens an assistant and the view for language models. A user closes both.
PUT_AWAY = """
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
"""


def show_memory(page: Page, address: str, experiment_id: str, run_id: str) -> None:
    """Open a run's charts and wait until they are drawn. The chart of the host's memory comes first."""
    page.add_init_script(PUT_AWAY)
    page.goto(f"{address}/#/experiments/{experiment_id}/runs/{run_id}/model-metrics")
    page.get_by_text("rss_mib", exact=True).first.wait_for()
    page.locator(".js-plotly-plot .scatterlayer path.js-line").first.wait_for(state="attached")
    page.wait_for_timeout(3000)  # the charts fade in


def newest_run(uri: str) -> tuple[str, str]:
    """Experiment and id of the newest run that memlog opened in a store."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    run = client.search_runs(experiments, "tags.`memlog.own` = 'true'", max_results=1)[0]
    return run.info.experiment_id, run.info.run_id


def main(uri: str, picture: Path) -> None:
    from support.mlflow_server import running_mlflow_server

    with (
        tempfile.TemporaryDirectory() as scratch,
        running_mlflow_server(Path(scratch), uri) as server,
        chromium() as page,
    ):
        show_memory(page, server.url, *newest_run(uri))
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], Path(sys.argv[2]))
