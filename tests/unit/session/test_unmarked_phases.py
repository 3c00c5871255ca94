"""Phases that memlog marks itself: saves, and a model's time in evaluation mode."""

from __future__ import annotations

import io
import threading
import weakref
from pathlib import Path

import pytest
import torch
from support.events import recorded
from torch import nn

import memlog
from memlog.events import Phase

pytestmark = pytest.mark.usefixtures("runs")


def names(session: memlog.Session) -> list[str]:
    return ["/".join((*each.within, each.label)) for each in recorded(session, Phase)]


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def test_saves_are_phases_until_the_session_ends() -> None:
    save = torch.save
    session = memlog.init("local")
    torch.save({}, io.BytesIO())
    with pytest.raises(AttributeError):
        torch.save({}, object())  # type: ignore[arg-type] # is to fail
    memlog.finish()
    assert [(each.label, each.error) for each in recorded(session, Phase)] == [
        ("torch.save", None),
        ("torch.save", "AttributeError"),
    ]
    assert torch.save is save is torch.serialization.save


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_save_is_one_phase(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    session = memlog.init("local")
    checkpoint.save({"weight": torch.ones(4), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    memlog.finish()
    assert names(session) == ["dcp.save"]


def test_a_save_in_another_thread_or_of_a_trainer_is_no_phase() -> None:
    session = memlog.init("local")
    with memlog.phase("checkpoint"):
        torch.save({}, io.BytesIO())
    thread = threading.Thread(target=torch.save, args=({}, io.BytesIO()))
    thread.start()
    thread.join()
    memlog.finish()
    assert names(session) == ["checkpoint"]


def test_a_model_is_evaluated_from_eval_to_train() -> None:
    evaluate, set_mode = nn.Module.eval, nn.Module.train
    session = memlog.init("local")
    model, teacher = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4).requires_grad_(False)
    model.eval()  # before the first step: no evaluation of a training
    model.train()
    train(model)
    teacher.eval()
    model.eval()
    torch.save({}, io.BytesIO())
    model.train()
    assert nn.Module.train is set_mode
    train(model)
    model.eval()
    memlog.finish()
    assert names(session) == ["eval mode/torch.save", "eval mode", "eval mode"]
    assert (nn.Module.eval, nn.Module.train) == (evaluate, set_mode)
    assert not model.training


def test_training_in_evaluation_mode_is_no_evaluation() -> None:
    session = memlog.init("local")
    model = nn.Linear(4, 4)
    train(model)
    model.eval()
    train(model)
    model.train()
    memlog.finish()
    assert names(session) == []


def test_a_model_in_evaluation_mode_is_not_kept_alive() -> None:
    memlog.init("local")
    model = nn.Linear(4, 4)
    train(model)
    model.eval()
    freed = threading.Event()
    weakref.finalize(model, freed.set)
    del model
    assert freed.is_set()
    memlog.finish()
