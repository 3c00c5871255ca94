"""Two real trainings, compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import child
from support.training import Case, measured_peak, squares

from memlog.cli.main import cli

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integration

PROGRAM = """
import sys, torch, memlog
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())))
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.01)
batch = torch.randn(1200, 512)
with memlog.init("local", name=sys.argv[1], model=model, layers=True) as session:
    for _ in range(10):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(session.id)
"""


def test_a_gate_sees_the_optimizers_state_of_a_short_run(tmp_path: Path) -> None:
    from torch import nn

    runs = []
    for name in ("SGD", "Adam"):
        printed = child.run(PROGRAM, tmp_path, name, CUDA_VISIBLE_DEVICES="")
        runs.append(printed.split()[-1])
    gate = ("--dir", str(tmp_path / "memlog_runs"), "--json", "--fail-if", "trace.peak > +5%")
    compared = CliRunner().invoke(cli, ["compare", *runs, *gate])
    assert compared.exit_code == 1
    assert "the gate 'trace.peak > +5%' failed" in compared.stderr
    case = Case(
        lambda: nn.Sequential(*(p for _ in range(6) for p in (nn.Linear(512, 512), nn.ReLU()))),
        lambda batch: torch.randn(batch, 512),
        squares,
        1200,
    )
    peaks = json.loads(compared.stdout)["figures"]["trace.peak"]["values"]
    for peak, make in zip(
        peaks, (partial(torch.optim.SGD, lr=0.01), torch.optim.Adam), strict=True
    ):
        assert peak == pytest.approx(measured_peak(case, make=make), rel=0.1)
