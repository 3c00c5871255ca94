"""What a trainer will save, and how, is in the journal after its first steps; the way is never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import child
from support.events import events_in, runs_in
from support.lightning_runs import PREAMBLE as LIGHTNING

from memlog.events import SavedState
from memlog.reports import summarize

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ready_store")]
WEIGHTS = 4 * (64 * 64 + 64)

TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import memlog

    ROWS = [{"input_ids": one, "labels": one} for one in torch.arange(256).reshape(32, 8)]
    CONFIG = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=8, bos_token_id=0, eos_token_id=0
    )

    class Own(Trainer):
        def save_model(self, *arguments, **named):
            pass

    def train(kind=Trainer, model=None, **more):
        model = model or GPT2LMHeadModel(CONFIG)
        arguments = TrainingArguments(
            "out", max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
            **{"save_strategy": "steps", "save_steps": 100, **more},
        )
        kind(model, arguments, train_dataset=ROWS).train()
        return sum(one.nbytes for one in model.parameters())

    memlog.init()
    print("bytes", train())
    train(save_steps=1, save_only_model=True)
    train(save_strategy="no")
    train(Own)

    import functools
    def with_save(save_pretrained):
        model = GPT2LMHeadModel(CONFIG)
        model.save_pretrained = save_pretrained(model)
        train(model=model)

    with_save(lambda model: functools.partial(model.save_pretrained, max_shard_size="1MB"))
    with_save(lambda model: functools.partial(model.save_pretrained, state_dict={}))
    with_save(lambda model: lambda folder, **named: None)

    class OwnModel(GPT2LMHeadModel):
        def save_pretrained(self, folder, **named):
            pass

    train(model=OwnModel(CONFIG))
    hooked = GPT2LMHeadModel(CONFIG)
    hooked.transformer.wte.register_state_dict_post_hook(lambda module, state, prefix, local: None)
    train(model=hooked)

    class OwnCheckpoint(Trainer):
        def _save_checkpoint(self, model, trial):
            pass

    train(OwnCheckpoint)
"""


def states(folder: Path) -> list[SavedState]:
    [run] = runs_in(folder)
    return events_in(run, SavedState)


def test_the_transformers_trainer_tells_what_it_saves(tmp_path: Path) -> None:
    printed = child.run(TRANSFORMERS, tmp_path).split()
    size = int(printed[printed.index("bytes") + 1])
    both, model, never, own, in_files, *unknown = states(tmp_path)
    assert (both.way, both.first_at) == ("transformers_trainer", 2)  # the training ends there
    assert both.model.host == size
    # Adam keeps two numbers for each parameter, and counters.
    assert 2 * size < both.optimizer.host < 2.1 * size
    assert (model.way, model.first_at, model.optimizer.host) == ("transformers_trainer", 2, 0)
    assert never.way is None
    assert own.way is None
    assert both.shard == 50 * 10**9
    assert (in_files.way, in_files.shard) == ("transformers_trainer", 10**6)
    assert [one.way for one in unknown] == [None] * 5


SAVES = """
    def fit(*callbacks, base=Model, change=lambda module: None, **more):
        class Wide(base):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(64, 64)

            def loss_of(self, batch):
                return self.layer(batch.float().expand(64)).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        trainer = pl.Trainer(
            max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            accelerator="cpu", callbacks=list(callbacks), **more,
        )
        module = Wide()
        change(module)
        trainer.fit(module, DataLoader(torch.arange(6)))

    class Own(ModelCheckpoint):
        pass

    begin("local")
    fit(ModelCheckpoint("saved", every_n_train_steps=3))
    fit(ModelCheckpoint("saved", save_weights_only=True))
    fit(ModelCheckpoint("saved", every_n_train_steps=100))
    fit(ModelCheckpoint("saved", save_top_k=0))
    fit(Own("saved"))
    fit(enable_checkpointing=False)

    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
    from torchmetrics import MeanMetric

    def changed(*callbacks, **more):
        fit(ModelCheckpoint("saved", every_n_train_steps=3), *callbacks, **more)

    changed(EarlyStopping("loss", check_on_train_epoch_end=False),
            change=lambda module: module.add_module("mean", MeanMetric()))

    class Drops(Model):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {}

    class Fewer(Model):
        def state_dict(self, *arguments, **named):
            return {}

    class Adds(pl.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["more"] = torch.ones(8)

    class Keeps(pl.Callback):
        def state_dict(self):
            return {"more": torch.ones(8)}

    changed(base=Drops)
    changed(base=Fewer)
    changed(change=lambda module: module.layer.register_state_dict_pre_hook(lambda *_: None))
    changed(change=lambda module: module.layer._register_state_dict_hook(lambda *_: None))
    changed(Adds())
    changed(Keeps())
    changed(EMAWeightAveraging())
"""


def test_lightning_tells_what_it_saves(tmp_path: Path) -> None:
    child.run(LIGHTNING + SAVES, tmp_path)
    every, weights, *without = states(tmp_path)
    without, known, unknown = without[:4], without[4], without[5:]
    assert (known.way, known.first_at) == ("lightning", 3)
    assert [one.way for one in unknown] == [None] * 7
    assert (every.way, every.first_at) == ("lightning", 3)
    assert (every.model.host, every.optimizer.host) == (WEIGHTS, WEIGHTS)
    assert (weights.way, weights.first_at, weights.optimizer.host) == ("lightning", None, 0)
    assert [one.way for one in without] == [None] * 4


LOOP = """
    import torch
    import memlog

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64, affine=False))
    other = torch.nn.Linear(64, 64)
    memlog.init("local"{})
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, other)]
    for _ in range(40):
        for one, optimizer in zip((model, other), optimizers):
            one(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.parametrize(
    ("argument", "size"), [("", 2 * WEIGHTS), (", model=model", WEIGHTS + 2 * 64 * 4 + 8)]
)
def test_a_loops_sizes_are_known_but_not_its_way(tmp_path: Path, argument: str, size: int) -> None:
    child.run(LOOP.format(argument), tmp_path)
    [state] = states(tmp_path)
    assert (state.way, state.whole_model) == (None, bool(argument))
    assert (state.model.host, state.optimizer.host) == (size, 2 * WEIGHTS)
    summary = summarize(runs_in(tmp_path)[0])
    assert summary.saving_is_partial is not bool(argument)
    [buffer] = [each.host for each in summary.saving if each.way == "torch_save_buffer"]
    assert buffer == size + 2 * WEIGHTS
    assert summary.findings == []
