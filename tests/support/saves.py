"""Saves of checkpoints in every way, each in a process of its own, and the memory that they really take.

``python -m tests.support.saves DEVICE WAY…`` prints a line of JSON for each way: how far the highest
resident set and the device's allocated memory rise, beside the `memlog.facts.later_memory.SavingCost`
of the tensors.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec.structs import asdict
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memlog.autolog.saved_state import saved_state
from memlog.facts.later_memory import saving_costs

RANKS = 8
LARGE, TINY = (12_000, 3000), (200, 8)
OF_SHARDED = ("dcp_save", "full_state_dict", "full_state_dict_on_device")
"""Ways that are tried in torch's fake process group, with a model sharded by FSDP2."""
OF_A_PROCESS = (
    "state_dict",
    "deepcopy",
    "cpu_copies",
    "torch_save",
    "torch_save_buffer",
    "dcp_save",
    "dcp_async_save",
    "save_pretrained",
    "transformers_trainer",
    "lightning",
)
_numbers = itertools.count()


class LocalPlanner(DefaultSavePlanner):
    """Planner for one rank of the fake process group, which has no plans of the other ranks."""

    def create_global_plan(self, all_plans: Any) -> Any:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


def model_of(size: tuple[int, int], way: str, device: str) -> nn.Module:
    rows, width = size
    if way in ("save_pretrained", "transformers_trainer"):
        from transformers import GPT2Config, GPT2LMHeadModel

        heads = width // 4
        config = GPT2Config(n_embd=heads * 4, n_layer=1, n_head=4, vocab_size=rows, n_positions=64)
        return GPT2LMHeadModel(config).to(device)
    made = nn.Sequential(
        nn.Embedding(rows, width), nn.Linear(width, width), nn.Linear(width, width)
    )
    return made.to(device)


class Saved:
    """A model and its optimizer after a step, and what a way of saving has made."""

    def __init__(self, size: tuple[int, int], way: str, device: str, *, shard: bool) -> None:
        self.folder = tempfile.mkdtemp()
        self.way = way
        self.kept: list[Any] = []
        self.save = getattr(self, f"_{way}")
        self.model = model_of(size, way, device)
        if shard:
            for layer in self.model.children():
                fully_shard(layer)
            fully_shard(self.model)
        if way == "transformers_trainer":
            self.save = self._train_with_transformers(device)
        elif way != "lightning":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
            for one in self.model.parameters():
                one.grad = torch.zeros_like(one)
            self.optimizer.step()

    def during(self, work: Callable[[], None]) -> None:
        """Do some work while the training goes on. Lightning moves all tensors to the host at its end."""
        if self.way == "lightning":
            self._fit_with_lightning(work)
        else:
            work()

    def path(self) -> str:
        return f"{self.folder}/{next(_numbers)}"

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _state_dict(self) -> None:
        self.kept.append(self._state())

    def _deepcopy(self) -> None:
        self.kept.append(copy.deepcopy(self._state()))

    def _cpu_copies(self) -> None:
        states = self.optimizer.state_dict()["state"].values()
        self.kept.append([each.cpu() for each in self.model.state_dict().values()])
        self.kept.append([each.cpu() for state in states for each in state.values()])

    def _torch_save(self) -> None:
        torch.save(self._state(), self.path())

    def _torch_save_buffer(self) -> None:
        torch.save(self._state(), io.BytesIO())

    def _dcp_save(self) -> None:
        planner = LocalPlanner() if dist.is_initialized() else None
        dcp.save(self._state(), checkpoint_id=self.path(), planner=planner, no_dist=True)

    def _dcp_async_save(self) -> None:
        dcp.async_save(self._state(), checkpoint_id=self.path()).result()

    def _full_state_dict(self) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        self.kept.append(get_state_dict(self.model, self.optimizer, options=options))

    def _full_state_dict_on_device(self) -> None:
        options = StateDictOptions(full_state_dict=True)
        self.kept.append(get_state_dict(self.model, self.optimizer, options=options))

    def _save_pretrained(self) -> None:
        self.model.save_pretrained(self.path())

    _transformers_trainer = _lightning = _state_dict

    def _train_with_transformers(self, device: str) -> Callable[[], None]:
        from transformers import Trainer, TrainingArguments

        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
        arguments = TrainingArguments(
            output_dir=self.folder,
            max_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=device == "cpu",
            disable_tqdm=True,
        )
        trainer = Trainer(self.model, arguments, train_dataset=rows)
        trainer.train()
        self.model.zero_grad()
        self.optimizer = trainer.optimizer
        self.kept.append(trainer)
        return lambda: trainer._save_checkpoint(self.model, None)

    def _fit_with_lightning(self, work: Callable[[], None]) -> None:
        import lightning

        saved, inner = self, self.model

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def training_step(self, batch: Any, _: int) -> Any:
                return self.inner(batch.long()).sum()

            def configure_optimizers(self) -> Any:
                saved.optimizer = torch.optim.AdamW(self.parameters(), foreach=False)
                return saved.optimizer

            def on_train_end(self) -> None:
                work()

        on_device = next(inner.parameters()).is_cuda
        trainer = lightning.Trainer(
            max_steps=1,
            accelerator="gpu" if on_device else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.save = lambda: trainer.save_checkpoint(self.path())
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 3)))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measured(way: str, device: str, *, shard: bool) -> dict[str, Any]:
    """Return what a save takes, and its cost as computed. A tiny model is saved first, to load all code."""
    cuda = device == "cuda"
    if cuda:
        torch.zeros(1, device="cuda")
    if shard:
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    elif way == "dcp_async_save":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tiny = Saved(TINY, way, device, shard=shard)
    tiny.during(tiny.save)
    del tiny
    saved, figures = Saved(LARGE, way, device, shard=shard), {}
    saved.during(lambda: figures.update(_measure(saved, way, RANKS if shard else 1, cuda=cuda)))
    return figures


def _measure(saved: Saved, way: str, ranks: int, *, cuda: bool) -> dict[str, Any]:
    saved.optimizer.zero_grad()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    known = saved_state(saved.model, [saved.optimizer], ranks=ranks)
    assert known is not None
    [cost] = [asdict(each) for each in saving_costs(known) if each.way == way]
    allocated = pinned = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
        allocated = torch.cuda.memory_allocated()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    saved.save()
    host = _status("VmHWM") - before
    if cuda:
        allocated = torch.cuda.max_memory_allocated() - allocated
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"] - pinned
    return {**cost, "real_host": pinned or host, "real_device": allocated}


def main(device: str, *ways: str) -> None:
    warnings.simplefilter("ignore")
    for way in ways:
        if child := os.fork():
            assert not os.waitpid(child, 0)[1], way
            continue
        name = way.removeprefix("sharded:")
        print(json.dumps(measured(name, device, shard=name != way)), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
