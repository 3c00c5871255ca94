"""The demo as a person sees it: its printed lines, ``memlog show``, and MLflow's own page in a browser."""

import json
from pathlib import Path

import pytest
from support import child
from support.browser import chromium, mlflow_ui, newest_run, show_memory
from support.mlflow_server import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]

STEPS = 25


def test_the_demos_memory_is_on_mlflows_page(tmp_path: Path) -> None:
    printed = child.memlog("demo", "--steps", str(STEPS), directory=tmp_path)
    assert "memlog show latest" in printed
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in printed

    shown = json.loads(child.memlog("show", "latest", "--json", directory=tmp_path))
    assert (shown["status"], shown["steps"]) == ("finished", STEPS)
    assert shown["peaks"]["host.rss"]["bytes"] > 100 * 2**20

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with mlflow_ui(uri, free_port()) as address, chromium() as page:
        show_memory(page, address, *newest_run(uri))
        picture = page.screenshot(path=tmp_path / "page.png")
    assert len(picture) > 20_000  # an empty page is smaller: the charts were awaited above
