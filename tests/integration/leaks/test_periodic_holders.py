"""Real programs that keep memory at each evaluation: the holder is named. Bounded ones are not."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child

from memlog.events import Finding
from memlog.journal import RunDirectory

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PROGRAM = """
import torch
import memlog

torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
alerts = []
memlog.init("local", name="evaluates", on_alert=alerts.append)

class Trainer:
    def __init__(self):
        self.history = []
        self.best = []

trainer = Trainer()

def evaluate(step):
    {evaluate}

# The helper process may be late on a busy machine. So the program goes on until the holder is named.
for step in range({steps}):
    model(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 30 == 29:
        evaluate(step)
    if any("history" in alert.title for alert in alerts):
        break
memlog.finish()
"""
MANY = 6_000


def findings(evaluate: str, folder: Path, steps: int) -> list[Finding]:
    child.run(PROGRAM.format(evaluate=evaluate, steps=steps), folder, OMP_NUM_THREADS="1")
    return list(_read(folder / "memlog_runs"))


def _read(folder: Path) -> Iterator[Finding]:
    [run] = (path.parent for path in folder.glob("*/delivery"))
    for file in RunDirectory(run).files():
        for entry in file.read():
            if isinstance(entry.event, Finding):
                yield entry.event


def holder(found: list[Finding]) -> Finding:
    [named] = {one.title: one for one in found if "history" in one.title}.values()
    return named


def test_outputs_kept_at_each_evaluation_are_named(tmp_path: Path) -> None:
    kept = "trainer.history.append(torch.ones(2_000_000))"
    found = holder(findings(kept, tmp_path, MANY))
    assert found.kind == "kept_tensors"
    assert found.title.startswith("`trainer.history`, a list in `__main__` (train.py:")
    assert "gains one tensor every 30 steps. That keeps 7.6 MiB each time" in found.title
    assert (found.where or "").startswith("train.py:")
    assert found.rate == pytest.approx(8_000_000 / 30, rel=0.3)
    assert found.since_step is not None
    assert any("memory rose by" in one for one in found.evidence)
    assert found.confidence in ("medium", "high")
    assert found.remedy


def test_graphs_kept_at_each_evaluation_are_named(tmp_path: Path) -> None:
    kept = "trainer.history.append(model(torch.randn(2048, 128)).mean())"
    found = holder(findings(kept, tmp_path, MANY))
    assert found.kind == "kept_graph"
    assert ".detach()" in (found.remedy or "")


def test_an_evaluation_that_keeps_the_last_few_is_not_named(tmp_path: Path) -> None:
    bounded = "trainer.best = [*trainer.best, torch.ones(2_000_000)][-3:]"
    losses = "trainer.history.append(float(step))"
    assert findings(f"{bounded}; {losses}", tmp_path, 600) == []


def test_a_callbacks_list_is_named_and_not_the_integrations_list_of_trainers(
    tmp_path: Path,
) -> None:
    script = """
    import torch
    import transformers
    import memlog

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(128, 128)
        def forward(self, x=None, labels=None):
            return {"loss": torch.nn.functional.mse_loss(self.inner(x), labels)}

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, index):
            return {"x": torch.randn(128), "labels": torch.randn(128)}

    class KeepStates(transformers.TrainerCallback):
        def __init__(self):
            self.history = []
        def on_step_end(self, args, state, control, **_):
            if state.global_step % 20 == 19:
                self.history.append(torch.ones(2_000_000))
            if any("history" in alert.title for alert in alerts):
                control.should_training_stop = True

    def main():
        arguments = transformers.TrainingArguments(
            "out", max_steps=6_000, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )
        transformers.Trainer(
            model=Model(), args=arguments, train_dataset=Rows(), callbacks=[KeepStates()]
        ).train()

    alerts = []
    torch.set_num_threads(1)
    memlog.init("local", name="trains", on_alert=alerts.append)
    main()
    memlog.finish()
    """
    child.run(textwrap.dedent(script), tmp_path, OMP_NUM_THREADS="1")
    found = holder(list(_read(tmp_path / "memlog_runs")))
    assert found.title.startswith("`self.callback_handler.callbacks[…].history`, a list in `")
    assert (found.where or "").startswith("train.py:")
