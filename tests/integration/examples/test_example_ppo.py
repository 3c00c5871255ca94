"""The example of a PPO loop names the phase that makes the peak."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child

from memlog.cli.main import cli

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[3] / "examples" / "ppo_phases.py"


def test_the_update_makes_the_peak_and_the_table_says_so(tmp_path: Path) -> None:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
    options = ("--iterations", "2", "--carts", "1024", "--minibatches", "1")
    done = child.run_program(EXAMPLE, *options, directory=tmp_path, environment=inherited)
    assert done.returncode == 0, done.stderr

    runs = ["latest", "--dir", str(tmp_path / "memlog_runs")]
    phases = json.loads(CliRunner().invoke(cli, ["show", *runs, "--json"]).output)["phases"]
    assert set(phases) == {"rollout", "learn", "advantages", "update"}
    assert {label: each["count"] for label, each in phases.items()} == dict.fromkeys(phases, 2)
    made = {label: each["peaks"]["host"]["made_the_peak"] for label, each in phases.items()}
    assert made == {"rollout": False, "learn": False, "advantages": False, "update": True}
    update, rollout = (phases[label]["peaks"]["host"] for label in ("update", "rollout"))
    # Only the update holds three activations of 64 MiB for each of the two networks.
    assert update["exact_bytes"] - rollout["at_least_bytes"] > 128 * 2**20

    shown = CliRunner().invoke(cli, ["show", *runs, "--all"]).output
    assert "learn > update" in shown
    assert "the run's peak" in shown
