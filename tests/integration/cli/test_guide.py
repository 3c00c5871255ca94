"""docs/MEMORY_MONITORING.md: every block of code runs, and prints what the page shows."""

import ast
import importlib.util
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import hyco, pages
from support.page_programs import Reader, Step

from memlog.alerts import parse_rules
from memlog.settings import resolve

pytestmark = pytest.mark.integration

PAGE = "MEMORY_MONITORING.md"
BLOCKS = pages.blocks(PAGE)
PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Output of each block of Python. All blocks run in one process, in order."""
    # The page shows the lines of a machine without a GPU.
    variables = {"PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""}
    with closing(Reader(tmp_path_factory.mktemp("guide"), variables)) as reader:
        return [reader.run(Step("python", "", block.code)) for block in PYTHON]


@pytest.mark.parametrize("index", range(len(PYTHON)))
@pytest.mark.seed(7, 20, 21, 22, 23, 24, 67, 78, 82, 125)
@pytest.mark.seed(126, 133, 136, 142, 145, 148, 149, 150, 158, 159, 160)
def test_blocks_of_python_print_what_stands_behind_them(index: int, printed: list[str]) -> None:
    pytest.importorskip("torch")
    assert pages.masked(printed[index]) == pages.masked(PYTHON[index].shown or "")


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"python", "yaml", "bash"}
    assert all(block.shown is None for block in BLOCKS if block.language != "python")


@hyco.needs_hyco
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"])
@pytest.mark.parametrize("experiment", ["burgers_experiment"])
@pytest.mark.seed(59, 72, 73, 76, 123, 124, 132)
def test_blocks_of_yaml_are_configurations_that_hyco_takes(
    block: pages.Block, experiment: str
) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from hyco.config import read_config

    given = OmegaConf.create(block.code)
    with initialize_config_dir(str(hyco.EXAMPLES / "hyco" / "conf"), version_base="1.3"):
        composed = compose(experiment)
    plain: Any = OmegaConf.to_container(OmegaConf.merge(composed, given), resolve=True)
    assert read_config(plain)
    parse_rules(resolve({}, plain).alerts)
    assert contains(plain, OmegaConf.to_container(given))


def contains(whole: Any, part: Any) -> bool:
    """Return True if every key of ``part`` is in ``whole``, with its value."""
    if not isinstance(part, dict):
        return bool(whole == part)
    return all(key in whole and contains(whole[key], value) for key, value in part.items())


def test_the_commands_are_those_that_hycos_tests_run() -> None:
    """tests/slow/test_hyco.py runs the page's commands and checks their output."""
    commands = [
        line for block in BLOCKS if block.language == "bash" for line in block.code.splitlines()
    ]
    run = (Path(__file__).parents[2] / "slow" / "test_hyco.py").read_text(encoding="utf-8")
    constants = {
        node.value
        for node in ast.walk(ast.parse(run))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert commands
    assert all(shlex.join(shlex.split(command)) in constants for command in commands)


@pytest.mark.seed(10, 20, 21, 22, 23, 65, 66, 68, 147, 153, 154)
def test_the_examples_show_the_six_ways(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(hyco.EXAMPLES / "memory_monitoring_examples.py")],
        cwd=tmp_path,
        env=hyco.environment(PYTHONWARNINGS="error", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("--- ")[1:]
    titles = [part.splitlines()[0] for part in parts]
    assert titles == [
        "1. Simple measurements",
        "2. Several checkpoints",
        "3. Context managers",
        "4. Decorators",
        "5. Epoch monitoring",
        "6. Batch profiling",
    ]
    simple, several, blocks, decorated, epochs, batches = parts
    assert "Before the model: CPU: " in simple
    assert [line.split(":")[0] for line in several.splitlines()[2:]] == [
        "  initialization",
        "  after_model",
        "  after_training",
    ]
    assert blocks.count("[Memory] ") == 3
    assert "[Memory] training epoch: CPU " in decorated
    assert epochs.count("  Batch 1: ") == epochs.count("  Epoch end: ") == 2
    assert batches.count("    Memory profile:") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.seed(2, 143)
def test_the_old_imports_are_memlogs_own() -> None:
    import memlog
    from memlog.compat import memory_monitor

    assert len(memory_monitor.__all__) == 6
    for name in memory_monitor.__all__:
        assert getattr(memory_monitor, name) is getattr(memlog, name)
    assert importlib.util.find_spec("memlog.compat.memory_monitor")
