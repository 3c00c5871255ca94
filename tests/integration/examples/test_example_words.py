"""`memlog demo --tiny`: the example for an installation without PyTorch, run as users run it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child

from memlog.cli.demo import demo

pytestmark = pytest.mark.integration


def test_if_pytorch_is_installed_it_names_the_list_that_keeps_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    demo = ("demo", "--tiny", "--steps", "150")
    process = child.start_memlog(*demo, directory=tmp_path, inherited=inherited)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert output.startswith("Counting the words of 150 pages")
    cause = "`done`, a list in `count_words()` (count_words.py:29), gains one element per step."
    *_, verdict, remedy, _ = errors.splitlines()
    assert verdict.startswith(f"memlog: {cause}")
    assert remedy == "memlog: what to do: Remove old elements, or limit its length."
    shown = json.loads(child.memlog("show", "latest", "--json", directory=tmp_path))
    assert (shown["status"], shown["steps"]) == ("finished", 150)
    assert shown["verdict"].startswith(cause)


def test_it_refuses_a_tracker() -> None:
    refused = CliRunner().invoke(demo, ["--tiny", "--backend", "mlflow"])
    assert refused.exit_code == 2
    assert refused.output.splitlines()[-1] == (
        "Error: --tiny uses no tracker: leave out --backend, or --tiny"
    )
