"""Real training whose inputs differ from step to step, in processes of their own."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import child

from memlog.cli.main import cli
from memlog.events import Alert, Event, Finding, OutOfMemory, StepInputs, Trace
from memlog.journal import RunDirectory, list_runs

pytestmark = pytest.mark.integration

PROGRAM = """
    import re, resource
    import torch
    import memlog

    torch.set_num_threads(1)
    torch.manual_seed(0)
    memlog.init("local", layers={layers}, budget={budget}, finish_timeout=60)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(100, 32)
            self.hidden = torch.nn.Linear(32, 256)
            self.head = torch.nn.Linear(256, 1000)

        def forward(self, ids, mask):
            return self.head(torch.relu(self.hidden(self.embed(ids) * mask[..., None])))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def limit(mib):
        used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20,) * 2)

    def evaluate():
        with torch.no_grad():
            model(torch.randint(0, 100, (8, 4000)), torch.ones(8, 4000))

    def train():
        for step in range({steps}):
            length = {length}
            batch = dict(input_ids=torch.randint(0, 100, (8, length)), mask=torch.ones(8, length))
            logits = model(batch["input_ids"], batch["mask"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            {after}

    train()
    memlog.finish()
"""


def trained(
    directory: Path,
    length: str,
    *,
    steps: int = 60,
    after: str = "pass",
    layers: bool = False,
    budget: float = 0.01,
    code: int = 0,
) -> RunDirectory:
    program = PROGRAM.format(length=length, steps=steps, after=after, layers=layers, budget=budget)
    process = child.start(program, directory, MEMLOG_DIR=str(directory), OMP_NUM_THREADS="1")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    (run,) = list_runs(directory)
    return run


def events(run: RunDirectory, kind: type[Event]) -> list[Any]:
    return [event for event in run.events() if isinstance(event, kind)]


def shown(run: RunDirectory, *options: str) -> str:
    found = CliRunner().invoke(cli, ["show", run.id, "--dir", str(run.path.parent), *options])
    assert found.exit_code == 0, found.output
    return found.output


def test_growing_lengths_are_found_once(tmp_path: Path) -> None:
    run = trained(tmp_path, "16 + 12 * step")
    findings = events(run, Finding)
    newest = findings[-1]
    assert {one.kind for one in findings} == {"larger_steps"}
    assert newest.where == 'dimension 1 of `batch["input_ids"]`'
    assert "The peak follows the sequence length" in newest.title
    assert len(events(run, Alert)) == 1
    records = events(run, StepInputs)
    assert records[-1].inputs[0].shape == (8, 16 + 12 * records[-1].step)
    assert all(record.like_step is None for record in records)
    document = json.loads(shown(run, "--json"))
    assert document["verdict"].startswith("The peak follows the sequence length")
    assert document["largest_step"]["inputs"][1]["name"] == 'batch["mask"]'
    assert '`batch["input_ids"]` 8×' in shown(run)  # noqa: RUF001 - the sign of a product


def test_one_very_long_batch_is_shown(tmp_path: Path) -> None:
    # Of the first twenty steps only two are traced, at the start, if the budget is enough on a slow machine.
    run = trained(tmp_path, "2000 if step == 15 else 32", steps=20, layers=True, budget=0.3)
    newest = events(run, StepInputs)[-1]
    assert (newest.step, newest.inputs[0].shape, newest.like_step) == (15, (8, 2000), None)
    assert events(run, Finding) == []
    output = CliRunner().invoke(cli, ["advise", run.id, "--dir", str(tmp_path)]).output
    output = " ".join(output.split())
    assert "largest step was 15" in output
    assert 'Its inputs: `batch["input_ids"]` 8'.replace("`", "") in output
    assert "It was not traced" in output


def test_an_evaluation_is_not_explained_by_the_steps_inputs(tmp_path: Path) -> None:
    run = trained(tmp_path, "32", after="evaluate() if step == 30 else None")
    newest = events(run, StepInputs)[-1]  # before it, memory may have risen by a per cent
    assert newest.step == 31
    assert newest.like_step is not None
    assert events(run, Finding) == []
    assert "something else made this peak" in " ".join(shown(run).split())


def test_the_inputs_of_a_step_that_fails(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        "32 + 4 * step if step < 40 else 9000",
        after="limit(400) if step == 5 else None",
        code=1,
    )
    (failure,) = events(run, OutOfMemory)
    assert [one.name for one in failure.inputs][:2] == ['batch["input_ids"]', 'batch["mask"]']
    assert failure.inputs[0].shape == (8, 9000)
    report = run.artifacts / "postmortem.md"
    deadline = time.monotonic() + 60
    while not report.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert 'Inputs of the step that failed: `batch["input_ids"]` 8×9000' in report.read_text()  # noqa: RUF001


def test_a_larger_step_is_traced_again_sooner(tmp_path: Path) -> None:
    # With the default budget, so short a run earns two traces only.
    run = trained(tmp_path, "32 if step < 70 else 600", steps=110, layers=True, budget=0.3)
    steps = [trace.step for trace in events(run, Trace)]
    larger = [step for step in steps if step is not None and step >= 70]
    assert larger
    assert larger[0] < 105  # the search for what keeps the memory that rose comes first
