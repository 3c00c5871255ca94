"""A real training loop in a user's own run: the data in MLflow afterwards."""

from pathlib import Path
from typing import Any

import pytest
from support import child, ranks
from support.mlflow_server import sqlite_store

pytestmark = pytest.mark.integration

STEPS, HELD_FROM, HELD_MIB = 20, 7, 256

LOOP = f"""
    import sys
    import mlflow
    import torch

    if "--memlog" in sys.argv:
        import memlog
        memlog.init("mlflow")

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = None
    mlflow.set_experiment("users")
    with mlflow.start_run(run_name="users"):
        mlflow.log_param("lr", 0.01)
        for step in range({STEPS}):
            if step == {HELD_FROM}:
                held = bytearray({HELD_MIB} * 1024 * 1024)
                held[::4096] = b"x" * len(held[::4096])
            loss = model(torch.ones(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mlflow.log_metric("loss", loss.item(), step=step)
"""


def only_run(directory: Path) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The only run and its metrics, read through MLflow's own client."""
    client, run = ranks.only_run(f"sqlite:///{directory}/mlflow.db")
    metrics = {
        key: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))
        for key in run.data.metrics
    }
    return run, metrics


def test_memory_held_from_a_step_on_rises_there_beside_the_users_own_rows(tmp_path: Path) -> None:
    with_memlog, without = tmp_path / "with", tmp_path / "without"
    for folder in (with_memlog, without):
        folder.mkdir()
        sqlite_store(folder)
    child.run(LOOP, with_memlog, "--memlog")
    child.run(LOOP, without)
    run, metrics = only_run(with_memlog)
    plain, plain_metrics = only_run(without)

    rss = metrics["memory/host/rss_mib"]
    assert [step for step, _ in rss] == list(range(STEPS))
    rise = rss[HELD_FROM][1] - rss[HELD_FROM - 1][1]
    assert rise == pytest.approx(HELD_MIB, rel=0.05)
    before = [value for step, value in rss if step < HELD_FROM]
    after = [value for step, value in rss if step >= HELD_FROM]
    assert min(after) - max(before) == pytest.approx(HELD_MIB, rel=0.05)

    assert {k: v for k, v in metrics.items() if not k.startswith("mem")} == plain_metrics
    own = {k: v for k, v in run.data.params.items() if not k.startswith("memlog/")}
    assert own == plain.data.params
    assert run.info.status == plain.info.status == "FINISHED"
    assert run.data.params["memlog/torch"].startswith("2.")
