"""The pages' code runs, and prints what the pages show."""

from contextlib import closing
from pathlib import Path

import pytest
from support import page_programs
from support.mlflow_server import sqlite_store

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "costs", "glossary")),
    *(
        path
        for folder in ("get-started", "how-to", "reference", "gallery")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
WITH_CODE = [page for page in PAGES if page_programs.steps(page)]
NAMES = [str(page.relative_to(ROOT)) for page in WITH_CODE]


@pytest.mark.parametrize("page", WITH_CODE, ids=NAMES)
def test_code_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    store = {}
    if "mlflow" in "".join(step.code for step in page_programs.steps(page)):
        store["MLFLOW_TRACKING_URI"] = sqlite_store(tmp_path)
    # The pages show what a machine without a GPU prints.
    environment = {
        **store,
        "CUDA_VISIBLE_DEVICES": "",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    with closing(page_programs.Reader(tmp_path, environment)) as reader:
        for step in page_programs.steps(page):
            printed = reader.run(step)
            lost = page_programs.missing(step.shown, printed)
            assert not lost, f"{step.code}\nprinted\n{printed}\nwithout\n" + "\n".join(lost)
    assert reader.exit_code == 0
