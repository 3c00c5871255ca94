"""HYCO's commands, run as they are documented, in a copy of the example."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.fork_server import ForkedProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240
"""Time limit of a command, which takes three to twelve seconds; PhiFlow may hang if its loss raises."""

LIBRARIES = ("torch", "phi", "hydra")
"""Packages that an experiment imports; PhiFlow alone takes two seconds."""

needs_hyco = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("phi", "hydra")),
    reason="phiflow or hydra-core is not installed: dependency group `examples`",
)


def copy_to(folder: Path) -> Path:
    copy = folder / "hyco"
    copy.mkdir()
    for module in (EXAMPLES / "hyco").glob("*.py"):
        shutil.copy(module, copy)
    shutil.copytree(EXAMPLES / "hyco" / "conf", copy / "conf")
    return copy


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that change where memlog writes."""
    own = ("MLFLOW_", "MEMLOG_", "WANDB_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return {**kept, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore", **more}


def run(folder: Path, command: str) -> list[str]:
    """Run a documented command (``python run.py …``); return its lines, errors among them.

    Fails if the command fails. Lines that depend on earlier runs or on the machine's speed are left out.
    """
    with start(folder, command) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    unsteady = ("Simulating ", "memlog: delivering the last points")
    return [line for line in output.splitlines() if not line.startswith(unsteady)]


def start(folder: Path, command: str) -> "subprocess.Popen[str]":
    """Start a documented command. Experiments run in a process that has imported their libraries already."""
    program, script, *arguments = command.split()
    assert program == "python"
    variables = environment(MLFLOW_DISABLE_TELEMETRY="true", PYTHONUNBUFFERED="1")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if script == "run.py" and sys.platform == "linux":
        path = folder / script
        return ForkedProcess(
            LIBRARIES, path, tuple(arguments), folder, folder, variables, **streams
        )
    whole = [sys.executable, script, *arguments]
    return subprocess.Popen(whole, cwd=folder, env=variables, encoding="utf-8", **streams)
