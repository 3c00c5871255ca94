"""Another distribution of the import name `memlog`, built and installed over memlog's own files."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
OTHER = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "memlog"
version = "0.3.1"
"""
INIT = """
import memlog
print("imported")
for _ in range(2):
    memlog.init("local", config={"quiet": True})
    memlog.finish()
"""


def install(source: Path, prefix: Path) -> None:
    """Build a distribution and install it below ``prefix``, without a network and without npm."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    done = subprocess.run(
        [*command, *alone, "--prefix", prefix, source],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def run(prefix: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    paths = sysconfig.get_paths(vars={"base": str(prefix), "platbase": str(prefix)})
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MEMLOG_", "MLFLOW_", "WANDB_"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=prefix,
        env={**clean, "PYTHONPATH": paths["purelib"], "HOME": str(prefix), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_is_told_by_doctor_and_once_by_init(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "memlog").mkdir(parents=True)
    (other / "pyproject.toml").write_text(OTHER)
    (other / "memlog" / "__init__.py").write_text('"""Another project."""\n')
    prefix = tmp_path / "prefix"
    install(ROOT, prefix)
    alone = run(prefix, "-c", INIT)
    assert (alone.stdout, alone.stderr) == ("imported\n", "")

    install(other, prefix)
    replaced = run(prefix, "-m", "memlog", "doctor", "--json")
    assert replaced.returncode == 1
    assert replaced.stderr.startswith(
        "memlog: another distribution has replaced memlog's own module"
    )
    [found] = [
        each for each in json.loads(replaced.stdout)["checks"] if each["name"] == "import name"
    ]
    assert found["text"].startswith("memlog 0.3.1 is installed, too, and has the same import name")
    assert found["remedy"].startswith(
        "`pip uninstall memlog` removes it; then install memlog-ml again"
    )

    install(ROOT, prefix)
    told = run(prefix, "-c", INIT)
    assert told.stdout == "imported\n"
    [line] = told.stderr.splitlines()
    assert line == f"memlog: {found['text']}: {found['remedy']}"
    silent = run(prefix, "-c", "import memlog")
    assert (silent.stdout, silent.stderr) == ("", "")
    other_rank = run(prefix, "-c", INIT, RANK="1", WORLD_SIZE="2")
    assert (other_rank.stdout, other_rank.stderr) == ("imported\n", "")
    assert run(prefix, "-m", "memlog", "doctor").stdout.count("memlog 0.3.1") == 1
