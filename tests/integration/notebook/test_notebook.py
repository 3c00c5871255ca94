"""A session and a tracer in a notebook, in a real kernel."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.browser import chromium

pytestmark = [
    pytest.mark.integration,
    # Warnings of zmq and asyncio inside nbclient when the kernel's channels are closed.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

CELLS = (
    """
import torch, memlog
network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(network.parameters())

def step():
    network(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

session = memlog.init("local", dir="runs", config={"quiet": True})
for _ in range(20):
    step()
""",
    "session",
    "memlog.finish()\nsession",
    "tracer = memlog.MemoryTracer()\ntracer",
    "with tracer.trace(network):\n    step()\ntracer",
    "tracer.result",
    "memlog.init(enabled=False)",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Output of each cell, by MIME type."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [_result(cell) for cell in notebook.cells]


def _result(cell: Any) -> dict[str, str]:
    results = [output for output in cell.outputs if output.output_type == "execute_result"]
    assert all(output.output_type != "error" for output in cell.outputs)
    return dict(results[0].data) if results else {}


def test_a_session_shows_its_report_and_its_state(
    shown: list[dict[str, str]], tmp_path: Path
) -> None:
    running, ended = shown[1], shown[2]
    assert running["text/plain"].startswith("<memlog.Session run ")
    assert running["text/plain"].endswith(", recording, step 19>")
    assert ended["text/plain"].endswith(", ended>")
    for output in (running, ended):
        assert output["text/html"].startswith("<iframe ")
        assert 'sandbox="allow-scripts"' in output["text/html"]
    with chromium() as page:
        page.set_content(f"<!doctype html><body>{ended['text/html']}</body>")
        frame = page.frame_locator("iframe")
        frame.get_by_text("No growth: peak").first.wait_for()


def test_a_tracer_shows_what_the_step_was_made_of(shown: list[dict[str, str]]) -> None:
    empty, traced, result = shown[3], shown[4], shown[5]
    assert "text/html" not in empty
    assert empty["text/plain"].startswith("<memlog.MemoryTracer: nothing has been traced yet")
    assert traced["text/plain"].startswith("<memlog.MemoryTracer: peak ")
    assert result["text/plain"].startswith("Memory trace on cpu: ")
    assert (
        "cell In[1]:7 in step" in result["text/plain"]
    )  # not the number that is the cell's file name
    with chromium() as page:
        page.set_content(f"<!doctype html><body>{traced['text/html']}</body>")
        frames = page.locator("iframe").count()
        shown_in = page.frame_locator("iframe") if frames else page
        shown_in.get_by_text("optimizer state").first.wait_for()
        page.set_content(f"<!doctype html><body>{result['text/html']}</body>")
        page.get_by_text("optimizer state").first.wait_for()
        bar = page.get_by_role("img", name="At the peak")
        box = bar.bounding_box()
        assert box is not None
        parts = [part.bounding_box() for part in bar.locator("div").all()]
        assert sum(part["width"] for part in parts if part) == pytest.approx(box["width"], rel=0.02)
        assert page.locator("tbody tr").count() >= 4


def test_a_disabled_session_is_one_line(shown: list[dict[str, str]]) -> None:
    assert shown[6] == {"text/plain": "<memlog.Session disabled>"}
