"""Trainers on devices: Lightning, Transformers (on two devices: data parallel) and Accelerate."""

import sys
from pathlib import Path

import pytest
from support import child, device_figures, devices
from support.launching import launch, recorded, write

pytestmark = [pytest.mark.integration, pytest.mark.cuda]

MODEL = """
    def network():
        return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))

    DATA = torch.arange(96 * 64, dtype=torch.float32).reshape(96, 64)
"""

LIGHTNING = """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, number):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = pl.Trainer(
        max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(DATA, batch_size=16))
"""

TRANSFORMERS = """
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, inputs, labels):
            return {"loss": (self.network(inputs) - labels).square().mean()}

    arguments = transformers.TrainingArguments(
        "out", max_steps=12, per_device_train_batch_size=8, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"inputs": row, "labels": row[:1]} for row in DATA]
    transformers.Trainer(Model(), arguments, train_dataset=rows).train()
"""

ACCELERATE = """
    import accelerate

    from memlog_accelerate import MemlogTracker

    accelerator = accelerate.Accelerator(log_with=MemlogTracker(), mixed_precision="bf16")
    accelerator.init_trackers("digits")
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(DATA, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
"""


def script(trainer: str) -> str:
    return device_figures.OWN_FIGURES + MODEL + trainer


def check(folder: Path, names: tuple[str, ...]) -> None:
    (run,) = recorded(folder / "memlog_runs")
    steps = device_figures.check_figures(run, folder, read_later=True)
    assert len(steps) == 12
    assert {tuple(one.name for one in step.devices) for step in steps} == {names}
    assert run.status == "finished"


def test_lightning(tmp_path: Path) -> None:
    child.run("""\n    import memlog\n    memlog.init("local")""" + script(LIGHTNING), tmp_path)
    check(tmp_path, ("cuda0",))


def test_transformers_below_the_launcher(tmp_path: Path) -> None:
    write(tmp_path, script(TRANSFORMERS))
    launch(tmp_path, sys.executable, "train.py", CUDA_VISIBLE_DEVICES="0")
    check(tmp_path, ("cuda0",))


def test_transformers_on_two_devices(tmp_path: Path) -> None:
    beginning = """\n    import memlog\n    memlog.init("local")"""
    child.run(beginning + script(TRANSFORMERS), tmp_path, **devices.need_two())
    check(tmp_path, ("cuda0", "cuda1"))


def test_accelerate(tmp_path: Path) -> None:
    child.run(script(ACCELERATE), tmp_path)
    check(tmp_path, ("cuda0",))
