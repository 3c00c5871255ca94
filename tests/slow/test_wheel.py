"""The wheel, which users install: its contents, and its behaviour with the core alone."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
VIEWER = "memlog/artifacts/_speedscope/"
BUILD = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
CHARTS = "memlog/reports/page/_uplot/"
EXAMPLES = ("train_gpt.py", "count_words.py")


def source_files() -> set[str]:
    """Every file that the wheel must contain, by its path in the wheel."""
    packages = [CHECKOUT / "memlog", *(CHECKOUT / "integrations").glob("memlog_*")]
    return {
        str(path.relative_to(package.parent))
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(
    *command: str | Path, cwd: Path, expect_success: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command as on a user's machine: nothing of this test run's Python reaches the command."""
    leaks = ("PYTHON", "VIRTUAL_ENV", "MEMLOG_", "MLFLOW_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(leaks)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    if expect_success:
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*BUILD, folder, CHECKOUT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class Installed:
    """A new virtual environment with the wheel and its core dependencies, and an empty folder."""

    bin: Path
    cwd: Path

    def python(self, code: str, *, expect_success: bool = True) -> subprocess.CompletedProcess[str]:
        # -I: not even the working directory is on the path.
        return run(
            self.bin / "python", "-I", "-c", code, cwd=self.cwd, expect_success=expect_success
        )

    def memlog(
        self, *arguments: str, expect_success: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "memlog", *arguments, cwd=self.cwd, expect_success=expect_success)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    environment = Installed(folder / "venv" / "bin", folder / "work")
    environment.cwd.mkdir()
    run(environment.bin / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return environment


@pytest.mark.seed(172)
def test_the_wheel_holds_every_package_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {name for name in names if not name.startswith((VIEWER, CHARTS))}
    assert own == source_files() | {f"memlog/cli/{name}" for name in EXAMPLES}
    assert {"memlog/py.typed", "memlog_mlflow/py.typed"} <= names


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches speedscope: not installed")
def test_the_wheel_carries_speedscope_and_its_licences(wheel: Path, installed: Installed) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix(VIEWER) for name in archive.namelist() if VIEWER in name}
        licences = archive.read(f"{VIEWER}LICENSES.txt").decode()
        uplot = {name.removeprefix(CHARTS) for name in archive.namelist() if CHARTS in name}
    assert uplot == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSES.txt"}
    assert {"index.html", "LICENSES.txt"} <= names
    assert any(name.endswith(".js") and name.startswith("speedscope-") for name in names)
    for owner in ("Jamie Wong", "SIL OPEN FONT LICENSE", "Jason Miller", "protobuf", "Apache"):
        assert owner in licences
    code = (
        "from memlog._internal.npm_package import PACKAGES\n"
        "for package in PACKAGES: print(package.find(None) == package.installed)"
    )
    assert installed.python(code).stdout == "True\nTrue\n"


def test_without_npm_a_wheel_is_built_and_the_missing_viewer_said(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*BUILD, tmp_path, CHECKOUT],
        env={**environment, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines() + done.stdout.splitlines()
    messages = [line for line in lines if "memlog: " in line]
    assert messages == [
        "memlog: built without speedscope: npm is not installed",
        "memlog: built without uplot: npm is not installed",
    ]
    [built] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        assert not any(VIEWER in name or CHARTS in name for name in archive.namelist())


def test_the_wheel_carries_the_examples_as_they_are(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in EXAMPLES:
            carried = archive.read(f"memlog/cli/{name}")
            assert carried == (CHECKOUT / "examples" / name).read_bytes()


def test_the_wheel_registers_the_command_and_the_sinks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(path).decode())
    assert dict(entries["console_scripts"]) == {"memlog": "memlog.cli.main:main"}
    assert entries["memlog.sinks"]["mlflow"] == "memlog_mlflow:backend"


@pytest.mark.seed(32, 79, 144)
def test_it_imports_with_the_core_dependencies_alone(installed: Installed) -> None:
    code = "import memlog, memlog._version as v; print(memlog.__version__ == v.__version__)"
    assert installed.python(code).stdout == "True\n"


def test_the_command_lists_its_commands(installed: Installed) -> None:
    shown = installed.memlog("--help").stdout
    for command in ("demo", "open", "pull", "runs", "show", "sync"):
        assert command in shown


def test_a_missing_extra_is_one_line_with_the_remedy(installed: Installed) -> None:
    failed = installed.python("import memlog; memlog.init('mlflow')", expect_success=False)
    assert failed.returncode != 0
    last = failed.stderr.rstrip().splitlines()[-1]
    assert "MissingExtraError" in last
    assert "pip install 'mlflow>=" in last


def test_the_tiny_demo_needs_no_extra_and_reports_its_mistake(installed: Installed) -> None:
    done = installed.memlog("demo", "--tiny")
    printed = [line for line in done.stderr.splitlines() if line.startswith("memlog: ")]
    assert any("The process's memory grows by 19" in line for line in printed)
    assert not any("failed" in line for line in printed)
    verdict, *_ = installed.memlog("show", "latest").stdout.splitlines()
    assert verdict.startswith("The process's memory grows by 19")


def test_the_demo_without_its_extras_says_what_to_install(installed: Installed) -> None:
    failed = installed.memlog("demo", expect_success=False)
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr
    assert "pip install " in failed.stderr
