"""Pages in a real browser: for tests of their content, and for the picture of MLflow's page.

python tests/support/browser.py sqlite:////absolute/path/mlflow.db docs/images/mlflow-demo.png
"""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

BOOT_TIMEOUT = 120.0
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
def mlflow_ui(uri: str, port: int) -> Iterator[str]:
    """Run ``mlflow ui`` with a store, as a user does, and yield its address."""
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _wait_until_it_answers(url: str) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):  # noqa: S310
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer")


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
    """This process's children that have not been waited for."""
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
    """Take the picture of MLflow's page in docs/get-started/mlflow.md."""
    from support.mlflow_server import free_port

    with mlflow_ui(uri, free_port()) as address, chromium() as page:
        show_memory(page, address, *newest_run(uri))
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], Path(sys.argv[2]))
