"""A finding as a user sees it: at the end of training, in the tracker, in memlog's commands."""

import json
import re
import sys
from pathlib import Path

import pytest
from support import child

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = """
import torch
import memlog

memlog.init("mlflow", finish_timeout=120)
network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.Adam(network.parameters())
history = []
for step in range(120):
    loss = network(torch.randn(256, 256)).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(network(torch.randn(256, 256)).square().mean())
memlog.finish()
"""
NAMED = "`history`, a list in `__main__` (train.py:14), gains one tensor per step"


def trained(folder: Path) -> tuple[str, str]:
    """Train to the end, and return the verdict and the remedy: lines on standard error, before the last."""
    process = child.start(SCRIPT, folder, OMP_NUM_THREADS="1")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    *_, verdict, remedy, link = errors.splitlines()
    assert re.fullmatch(r"memlog: mlflow run '[\w-]+': `mlflow ui --backend-store-uri .*`", link)
    return verdict, remedy


def show(folder: Path, *arguments: str) -> str:
    return child.memlog("show", "latest", *arguments, directory=folder)


@pytest.mark.usefixtures("ready_store")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about mlflow's classes
def test_a_finding_is_shown_everywhere(tmp_path: Path) -> None:
    verdict, remedy = trained(tmp_path)
    assert verdict.startswith(f"memlog: {NAMED}")
    # Which of the two searches is the first one to be sure depends on how memory rises.
    assert remedy.startswith("memlog: what to do: Keep only ")
    assert "`.item()`" in remedy
    assert "`.detach()`" in remedy
    assert show(tmp_path).splitlines()[0].startswith(NAMED)
    document = json.loads(show(tmp_path, "--json"))
    (finding,) = document["findings"]
    assert document["verdict"].startswith(NAMED)
    assert finding["kind"] == "kept_graph"
    assert finding["confidence"] in ("high", "medium")  # 120 steps are few for the growth test
    assert 0.7 * 2**20 < finding["rate"] < 1.6 * 2**20
    titles = [alert["title"] for alert in in_mlflow(tmp_path)]
    # A run that has ended has no forecast.
    told = document["verdict"].replace("would have run out", "runs out")
    assert titles == [told]


def in_mlflow(folder: Path) -> list[dict[str, str]]:
    """Return the alerts of the only run, as MLflow's own client reads them."""
    from mlflow import MlflowClient
    from mlflow.artifacts import load_dict

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    alerts: list[dict[str, str]] = load_dict(f"{run.info.artifact_uri}/memlog/alerts.json")[
        "alerts"
    ]
    return alerts
