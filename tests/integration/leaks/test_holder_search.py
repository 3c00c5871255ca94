"""Scripts with a fault each, and healthy ones: which holder the search names."""

from __future__ import annotations

import gc
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlog._internal.diagnostics import Diagnostics
from memlog.leaks.holder_search import HolderSearch

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("few_objects")]

HERE = Path(__file__).parent
BEGIN = """import torch
from torch import nn
STEPS = 32
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
def batch():
    return torch.randn(32, 64)

def finish_step(zero=True):
    optimizer.step()
    if zero:
        optimizer.zero_grad()

"""
WARM_UP = 5
TINY = 1000


def scripts(name):
    """Return the scripts of a file, each as a pair: the words of its first line, and its text."""
    parts = re.split(r"^=== ", (HERE / name).read_text(), flags=re.MULTILINE)[1:]
    split = [part.partition("\n") for part in parts]
    return [pytest.param(head.split(), BEGIN + body, id=head.split()[0]) for head, _, body in split]


def search_in(script, tmp_path, name, rate):
    """Run a script with a search from `WARM_UP` steps on; return the holders."""
    file = tmp_path / f"{name}.py"
    file.write_text(script)
    diagnostics = Diagnostics()
    search = HolderSearch(budget_seconds=60, diagnostics=diagnostics, rate=rate)
    steps, finished = 0, False

    def step_ended(optimizer, _args, _kwargs):
        nonlocal steps, finished
        if type(optimizer) is torch.optim.SGD:
            steps += 1
            if steps > WARM_UP and not finished:
                finished = search.step_ended(steps)

    handle = register_optimizer_step_post_hook(step_ended)
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        handle.remove()
        search.stop()
        gc.enable()
    assert not diagnostics.faults
    assert finished
    return search.holders


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(("words", "script"), scripts("leaking_scripts.txt"))
def test_the_holder_is_named(words, script, tmp_path):
    name, kind, owner = words[:3]
    lines = {number for number, line in enumerate(script.splitlines(), 1) if "# <-" in line}

    top = search_in(script, tmp_path, name, rate=3000.0)[0]

    assert top.kind == kind
    assert owner == "-" or owner in top.title
    file, _, line = (top.where or "").partition(":")
    assert not lines or file == f"{name}.py"
    assert not lines or int(line) in lines
    assert all(word in top.remedy for word in words[4:])
    least, most = map(float, words[3].split("-"))
    assert least <= top.bytes_per_step / 1024 <= most


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(("words", "script"), scripts("healthy_scripts.txt"))
def test_nothing_is_named_in_a_healthy_script(words, script, tmp_path):
    found = search_in(script, tmp_path, words[0], rate=0.0)
    assert sum(one.bytes_per_step for one in found) < TINY


def test_what_one_of_the_watched_steps_keeps_is_told_without_a_rate(tmp_path):
    script = f"""{BEGIN}
total = torch.zeros(())
for step in range(STEPS):
    model(batch()).square().mean().backward()
    finish_step()
    if step % 4 == 0:
        total = total + model(batch()).square().mean()
"""
    top = search_in(script, tmp_path, "evaluates", rate=3000.0)[0]
    assert top.kind == "kept_graph"
    assert " at one of 4 steps, mostly" in top.title


def test_a_list_that_is_empty_when_the_search_begins_has_its_limit_too(tmp_path):
    script = f"""{BEGIN}
class Trainer:
    def __init__(self):
        self.outputs = []

    def step(self):
        out = model(batch())
        out.square().mean().backward()
        finish_step()
        self.outputs.append((out.detach(), 1))

    def end_epoch(self):
        self.outputs.clear()

trainer = Trainer()
for steps in (5, STEPS - 5):
    for _ in range(steps):
        trainer.step()
    trainer.end_epoch()
"""
    top = search_in(script, tmp_path, "epochs", rate=3000.0)[0]
    assert "self.outputs" in top.title
    assert top.bytes_left is not None
    assert "limit in the program (epochs.py:" in top.evidence[-1]
