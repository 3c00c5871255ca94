"""The example for new users and `memlog demo`, run as users run them."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child

from memlog.cli import demo as demo_module
from memlog.cli.demo import demo
from memlog.errors import MissingExtraError, UnknownBackendError

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
DEMO = "import torch\nfrom memlog.cli.demo import demo\ndemo()"
LOSSES = re.compile(r"^(before|after): training loss ([\d.]+), validation loss ([\d.]+)$")
STEPS = 12


def run(folder: Path, program: Path, *arguments: str, steps: int = STEPS) -> list[str]:
    """The lines that a Python program prints when it is started in ``folder``."""
    own = ("MLFLOW_", "MEMLOG_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    environment = {**inherited, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = child.run_program(
        program, *arguments, "--steps", str(steps), directory=folder, environment=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> dict[str, tuple[float, float]]:
    found = (LOSSES.match(line) for line in lines)
    return {match[1]: (float(match[2]), float(match[3])) for match in found if match}


def recorded_steps(folder: Path) -> list[int]:
    """The step of every batch in the journal of the one run in ``folder``."""
    [journal] = folder.glob("memlog_runs/*/trainer-*.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return [event[2] for _, event in records if event[0] == "batch"]


@pytest.fixture(scope="module")
def local_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def local_lines(local_folder: Path) -> list[str]:
    return run(local_folder, EXAMPLE, "--backend", "local")


def test_the_example_lowers_its_losses(local_lines: list[str]) -> None:
    measured = losses(local_lines)
    assert list(measured) == ["before", "after"]
    for before, after in zip(measured["before"], measured["after"], strict=True):
        assert after < before - 1


def test_memlog_notices_every_step(local_folder: Path, local_lines: list[str]) -> None:
    assert local_lines
    assert recorded_steps(local_folder) == list(range(STEPS))


def test_without_a_tracker_it_ends_with_the_command_that_shows_the_run(
    local_lines: list[str],
) -> None:
    assert local_lines[-3:] == [
        "Look at the memory of this run:",
        "  memlog show latest",
        "  memlog open latest    (which layer holds how much, in your browser)",
    ]


def test_the_same_seed_gives_the_same_losses(tmp_path: Path, local_lines: list[str]) -> None:
    (program := tmp_path / "demo.py").write_text(DEMO)
    lines = run(tmp_path, program, "--backend", "local", steps=2)
    assert losses(lines)["before"] == losses(local_lines)["before"]
    assert recorded_steps(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("sqlite:////data/a@b.db", "  mlflow ui --backend-store-uri sqlite:////data/a@b.db   ("),
        ("./mlruns", "  mlflow ui --backend-store-uri ./mlruns   ("),
        ("https://me:secret@host:8443/flow?token=secret", "  open https://host:8443/flow"),
        (
            "postgresql://me:secret@host/db",
            '  mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI" ',
        ),
    ],
)
def test_it_points_to_the_users_own_server_and_keeps_its_password(
    uri: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    runpy.run_path(str(EXAMPLE))["print_where_to_look"]("mlflow")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(line)
    assert "secret" not in printed


def test_without_pytorch_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "is_installed", lambda _: False)
    error = CliRunner().invoke(demo).exception
    assert isinstance(error, MissingExtraError)
    assert str(error).endswith("pip install torch, or do without: memlog demo --tiny")


def test_without_the_client_the_command_says_how_to_get_it_or_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memlog.sink.search.is_installed", lambda _: False)
    error = CliRunner().invoke(demo).exception
    assert isinstance(error, MissingExtraError)
    assert "pip install 'mlflow>=" in str(error)
    assert str(error).endswith("memlog demo --backend local")


def test_a_backend_that_nobody_provides_is_refused_before_anything_runs() -> None:
    assert isinstance(
        CliRunner().invoke(demo, ["--backend", "mlfow"]).exception, UnknownBackendError
    )


def test_the_command_line_is_restored_after_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train_gpt.py"
    program.write_text("import sys\nraise SystemExit(' '.join(sys.argv[1:]))\n")
    monkeypatch.setattr(demo_module, "__file__", str(tmp_path / "demo.py"))
    before = list(sys.argv)
    result = CliRunner().invoke(demo, ["--backend", "local", "--steps", "3"])
    assert result.output.strip() == "--backend local --steps 3"
    assert sys.argv == before
