"""Memory that saving a checkpoint takes: what memlog computes, beside real saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from support.saves import OF_A_PROCESS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memlog
from memlog.autolog.saved_state import saved_state
from memlog.cli.main import cli
from memlog.estimates.estimate import estimate_made_by
from memlog.facts.later_memory import saving_costs

pytestmark = pytest.mark.integration
NOISE = 2 * 2**20
"""Bytes that a save takes for itself: buffers of files, messages, imports."""


def saves(device: str, *ways: str) -> list[dict[str, Any]]:
    """Return the figures of real saves by a program of its own."""
    root = str(Path(__file__).parents[3])
    paths = (root, f"{root}/integrations", f"{root}/tests")
    with tempfile.TemporaryDirectory() as folder:
        more = {"PYTHONPATH": os.pathsep.join(paths), "FAKE_CUDA_COPY": "4k", "TMPDIR": folder}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.saves", device, *ways],
            cwd=root,
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            check=False,
        )
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]


def check(figures: dict[str, Any]) -> None:
    """Compare one real save with what was computed."""
    for real, low, high in [("host", "host", "host_most"), ("device", "device", "device")]:
        least, most = 0.95 * figures[low] - NOISE, 1.05 * figures[high] + NOISE
        assert least <= figures[f"real_{real}"] <= most, figures


@pytest.mark.slow
def test_saves_on_the_cpu_take_what_is_computed() -> None:
    found = saves("cpu", *OF_A_PROCESS)
    assert [each["way"] for each in found] == list(OF_A_PROCESS)
    for each in found:
        check(each)


class Tied(nn.Module):
    """Model with a shared weight, buffers of both kinds, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(32)
        self.fixed = nn.Parameter(torch.ones(32, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(1000), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(words)) * self.fixed.float())  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 32, num_layers=2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.inner(words[:, None, None].expand(-1, 3, 16) * 1.0)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Tied, Recurrent])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_an_estimate_knows_what_a_real_model_saves(
    make: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        model(torch.arange(batch)).square().mean().backward()
        optimizer.step()

    options = {"batch": 8, "device": "cpu"}
    estimated = memlog.estimate(step, model=make, optimizer=optimizer, **options)  # type: ignore[arg-type]
    model = make()
    used = optimizer(model.parameters())
    step(model, used, 8)
    known = saved_state(model, [used])
    assert known is not None
    assert estimated.saving == saving_costs(known)
    in_order = [*model.state_dict().values(), *_nested(used.state_dict()["state"])]
    sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in in_order}
    [deepcopy] = [each for each in estimated.saving if each.way == "deepcopy"]
    assert deepcopy.host == sum(sizes.values())


def _nested(state: dict[Any, dict[str, Any]]) -> list[torch.Tensor]:
    values = (each for one in state.values() for each in one.values())
    return [each for each in values if isinstance(each, torch.Tensor)]


def test_model_and_optimizer_are_found_in_the_step() -> None:
    def job() -> dict[str, Any]:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.arange(8, device="cuda")).mean().backward()
            optimizer.step()

        return {"step": step, "model": model, "optimizer": optimizer}

    named = estimate_made_by(job)
    unnamed = estimate_made_by(lambda: {"step": job()["step"]})
    ways, sizes = zip(*((one.way, one.host + one.device) for one in named.saving), strict=True)
    assert {"dcp_save", "lightning"} <= set(ways)
    assert tuple(each.way for each in unnamed.saving) == ways
    assert [one.host + one.device for one in unnamed.saving] == pytest.approx(sizes, rel=0.02)
    alone = memlog.estimate(lambda: torch.ones(8, device="cuda").square().sum())
    assert alone.saving == ()


def test_shards_on_the_host_are_gathered_there() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        known = saved_state(model, [optimizer], ranks=2)
    finally:
        dist.destroy_process_group()
    assert known is not None
    costs = {each.way: each for each in saving_costs(known)}
    first, second = 4 * 64 * 32, 4 * 32 * 16
    before = first + second + first  # the model, and the first tensor of the optimizer's state
    most = max(first + second + 2 * first, before + 2 * second)  # Gloo copies what it gathers
    for way in ("full_state_dict", "full_state_dict_on_device"):
        assert (costs[way].host, costs[way].device) == (most, 0)  # type: ignore[index]
    assert "lightning" not in costs


JOB = """
import torch
from torch import nn

def job(batch):
    model = nn.Linear(4096, 4096)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.randn(batch, 4096)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"step": step, "model": model, "optimizer": optimizer}
"""


def test_the_command_prints_what_saving_takes(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["estimate", f"{script}:job", "--batch", "64"]
    shown = CliRunner().invoke(cli, command)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("saving a")) :]
    assert rows[1].split() == ["state_dict()", "0", "B", "0", "B"]
    assert any(row.startswith("dcp.async_save ") and "192.0 MiB" in row for row in rows)
    document = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    [saved] = [each for each in document["saving"] if each["way"] == "torch_save"]
    assert saved == {
        "way": "torch_save",
        "host": 2**26,
        "host_most": 2**26 + 3 * 2**14,
        "device": 0,
    }
