"""The search for the outermost module of a session that was given no model, and its cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Event, Trace
from memlog.tracer import module_names
from memlog.tracer.schedule.step_scheduler import StepScheduler


class Player(nn.Module):
    """An agent: nobody calls its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.actor(rows) - self.critic(rows)).square().mean()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Searches among all objects of the process. Each is expected to take 0.3 s."""
    seen: list[str] = []
    instances = module_names.instances
    monkeypatch.setattr(module_names, "search_seconds", lambda: 0.3)
    monkeypatch.setattr(
        module_names, "instances", lambda *kinds: (seen.append("all modules"), instances(*kinds))[1]
    )
    return seen


class Trained:
    """A training loop with a scheduler that was given no model, and the names of the layers it traced."""

    def __init__(
        self, folder: Path, loss: Callable[[torch.Tensor], torch.Tensor], model: Any
    ) -> None:
        self.events: list[Event] = []
        self.scheduler = StepScheduler(
            folder / "kept", self.events.append, Diagnostics(), None, 0.01
        )
        self._loss, self._step = loss, 0
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self) -> None:
        self._loss(torch.ones(4, 8)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.scheduler.after_step(self._step)
        self._step += 1

    def layers(self) -> list[set[str]]:
        traced = [each for each in self.events if isinstance(each, Trace)]
        return [{layer.path for layer in each.layers} for each in traced]


def hidden() -> tuple[list[Any], Callable[[torch.Tensor], torch.Tensor]]:
    """Return a player to which no variable of a running function refers, and its loss."""
    player = Player()
    actor, critic = player.actor, player.critic
    return [[[[[player]]]]], lambda rows: (actor(rows) - critic(rows)).square().mean()


def test_the_model_of_a_called_part_is_found_among_the_variables(
    tmp_path: Path, searches: list[str]
) -> None:
    player = Player()
    trained = Trained(tmp_path, player.loss, player)
    trained.step()
    trained.scheduler.finish(failed=False)
    assert not searches
    assert [{"actor", "critic.0"} <= paths for paths in trained.layers()] == [True]


def test_a_model_that_has_all_parameters_of_its_optimizer_costs_no_search(
    tmp_path: Path, searches: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    trained = Trained(tmp_path, lambda rows: model(rows).mean(), model)
    trained.step()
    assert trained.scheduler.costs.budget.search_due == 0
    trained.scheduler.want()
    trained.step()
    trained.scheduler.finish(failed=False)
    assert not searches
    assert all({"Sequential", "0", "1"} <= paths for paths in trained.layers())


def test_networks_of_one_optimizer_are_searched_once(tmp_path: Path, searches: list[str]) -> None:
    coder, head = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 1))
    both = nn.ModuleList([coder, head])
    trained = Trained(tmp_path, lambda rows: head(coder(rows)).mean(), both)
    del both
    trained.step()
    assert not searches
    assert trained.scheduler.costs.budget.search_due == 0.3
    for _ in range(2):
        trained.scheduler.want()
        trained.step()
    trained.scheduler.finish(failed=False)
    assert searches == ["all modules"]
    assert trained.scheduler.costs.budget.search_due == 0


def test_a_parent_that_no_variable_shows_names_the_layers_once_the_search_is_earned(
    tmp_path: Path, searches: list[str]
) -> None:
    kept, loss = hidden()
    trained = Trained(tmp_path, loss, kept[0][0][0][0][0])
    trained.step()
    assert not searches
    trained.scheduler.want()
    trained.step()
    trained.scheduler.finish(failed=False)
    assert "all modules" in searches
    first, second = trained.layers()
    assert not {"actor", "critic.0"} & first
    assert {"actor", "critic.0"} <= second


def test_a_search_that_the_budget_covers_comes_before_the_first_trace(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_names, "search_seconds", lambda: 0.04)
    kept, loss = hidden()
    trained = Trained(tmp_path, loss, kept[0][0][0][0][0])
    trained.step()
    trained.scheduler.want()
    trained.step()
    trained.scheduler.finish(failed=False)
    assert searches == ["all modules"]
    assert all({"actor", "critic.0"} <= paths for paths in trained.layers())


def test_a_search_comes_after_the_first_trace_if_the_budget_hardly_covers_both(
    tmp_path: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected time holds for no machine: the search used up the budget, and no step was traced."""
    monkeypatch.setattr(module_names, "search_seconds", lambda: 0.06)
    kept, loss = hidden()
    trained = Trained(tmp_path, loss, kept[0][0][0][0][0])
    trained.step()
    trained.scheduler.finish(failed=False)
    assert not searches
    assert len(trained.layers()) == 1


def test_a_second_network_does_not_cost_a_search_that_is_not_earned(
    tmp_path: Path, searches: list[str]
) -> None:
    maker, critic = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 1))
    both = nn.ModuleList([maker, critic])
    trained = Trained(tmp_path, lambda rows: critic(maker(rows)).mean(), maker)
    del both
    trained.step()
    trained.scheduler.finish(failed=False)
    assert not searches
    assert any("Sequential 2" in path for paths in trained.layers() for path in paths)


def test_the_expected_seconds_of_a_search_rise_with_the_objects_of_the_process() -> None:
    before = module_names.search_seconds()
    rows = [{"row": [row]} for row in range(50_000)]
    assert 0 < before < module_names.search_seconds()
    del rows
