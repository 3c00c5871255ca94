"""Networks that are traced without being named: their choice, and the memory counted as theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memlog import MemoryTracer
from memlog.tracer import module_names


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def test_the_modules_at_the_top_are_found_with_what_is_theirs() -> None:
    """Adversarial training: two networks of one class, and a loss that has nothing."""
    made, judged = square(), square()
    loss = nn.MSELoss()
    optimizer = torch.optim.Adam([*made.parameters(), *judged.parameters()])

    def step() -> None:
        loss(judged(made(torch.ones(8, 64))), torch.zeros(8, 64)).backward()
        optimizer.step()

    step()  # gradients and the optimizer's state are there already
    weights = sum(p.nbytes for p in made.parameters())
    tracer = MemoryTracer()
    with tracer.trace():
        step()
    sizes: dict[tuple[str, str], int] = {}
    for share in tracer.result.shares:
        name = share.path.partition(".")[0]
        sizes[name, share.category] = sizes.get((name, share.category), 0) + share.size
    for name in ("(Sequential)", "(Sequential 2)"):
        assert sizes[name, "parameters"] == weights
        assert sizes[name, "gradients"] == weights
        assert sizes[name, "optimizer state"] >= 2 * weights
    assert "other" not in {category for _, category in sizes}
    assert "(MSELoss)" in tracer.get_layer_stats()


def test_further_networks_of_one_class_are_distinguished_and_losses_are_not() -> None:
    networks = [square() for _ in range(3)]
    tracer = MemoryTracer()
    with tracer.trace():
        for network in networks:
            nn.MSELoss()(network(torch.ones(8, 64)), torch.zeros(8, 64)).backward()
    paths = set(tracer.get_layer_stats())
    assert {
        "(Sequential)",
        "(Sequential 2)",
        "(Sequential 3)",
        "(MSELoss)",
        "(Sequential).0",
        "(Sequential 3).0",
    } <= paths
    assert "(MSELoss 2)" not in paths


def test_two_networks_are_traced_alike_whether_named_or_found() -> None:
    """A generator and its critic, with the generator named, with none named and with both in one module."""

    def peaks(which: str) -> Any:
        torch.manual_seed(0)
        generator, critic = nn.Sequential(nn.Linear(64, 256)), nn.Sequential(nn.Linear(256, 32))
        optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, critic)]
        both = nn.ModuleList([generator, critic])
        given: Any = {"both": both, "one": generator, "none": None}[which]
        tracer = MemoryTracer()
        for _ in range(2):
            with tracer.trace(given):
                critic(generator(torch.ones(8, 64))).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        result = tracer.result
        owned = {
            share.category: share.size
            for share in result.shares
            if share.category in ("parameters", "gradients", "optimizer state")
        }
        return result.peak, result.before, result.end, result.categories, owned.keys()

    assert peaks("both") == peaks("one") == peaks("none")


class Agent(nn.Module):
    """Agent whose parts are called, and whose ``forward`` never is."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def act(self, seen: torch.Tensor) -> torch.Tensor:
        return self.actor(seen).mean() + self.critic(seen).mean()


def paths_of(step: Any, model: Any = None) -> set[str]:
    tracer = MemoryTracer()
    with tracer.trace(model):
        step()
    return set(tracer.get_layer_stats())


def test_parts_are_named_by_the_model_that_registers_them() -> None:
    agent = Agent()
    paths = paths_of(lambda: agent.act(torch.ones(8, 64)).backward())
    assert {"critic.2", "actor.0"} <= paths
    assert not any(path.startswith("(") and "outside" not in path for path in paths)


def test_of_several_models_that_register_a_part_the_trained_one_names_it() -> None:
    agent = Agent()
    other = nn.Sequential(agent.actor)
    optimizer = torch.optim.Adam(agent.parameters())
    paths = paths_of(lambda: agent.act(torch.ones(8, 64)).backward())
    assert {"critic.2", "actor.0"} <= paths
    del optimizer, other


def test_a_part_of_two_untrained_models_names_itself() -> None:
    trunk = nn.Sequential(nn.Linear(64, 64))
    others = [nn.Sequential(trunk), nn.Sequential(trunk)]
    assert {"Sequential", "0"} <= paths_of(lambda: trunk(torch.ones(8, 64)).sum().backward())
    del others


def test_a_wrapper_of_the_compiler_does_not_name_the_module_that_is_called_without_it() -> None:
    agent = Agent()
    wrapper = nn.Module()
    wrapper.add_module("_orig_mod", agent)  # as in torch.compile's
    assert {"critic.2", "actor.0"} <= paths_of(lambda: agent.act(torch.ones(8, 64)).backward())
    del wrapper


def test_only_trained_networks_beside_the_model_change_the_names_in_it() -> None:
    model, teacher = square(), square().requires_grad_(False)
    with_teacher = paths_of(
        lambda: (model(torch.ones(8, 64)) - teacher(torch.ones(8, 64))).sum().backward()
    )
    assert {"Sequential", "0", "(Sequential 2).0"} <= with_teacher
    named = paths_of(lambda: Agent().act(model(torch.ones(8, 64))).backward(), model)
    assert {"Sequential", "0", "(Agent).actor.0"} <= named


def test_a_network_that_no_optimizer_has_does_not_change_the_names_in_the_model() -> None:
    """The mean of a student's weights requires gradients as the student does, but it is not trained."""
    student, teacher = square(), square()
    optimizer = torch.optim.SGD(student.parameters())
    paths = paths_of(
        lambda: (student(torch.ones(8, 64)) - teacher(torch.ones(8, 64))).sum().backward()
    )
    assert {"Sequential", "0", "(Sequential 2).0"} <= paths
    del optimizer


def test_an_optimizer_of_copies_does_not_tell_which_networks_are_trained() -> None:
    first, second = square(), square()
    copies = [parameter.detach().clone() for parameter in first.parameters()]
    optimizer = torch.optim.SGD(copies)
    paths = paths_of(lambda: second(first(torch.ones(8, 64))).sum().backward())
    assert {"(Sequential).0", "(Sequential 2).0"} <= paths
    del optimizer


def test_an_optimizer_that_is_made_in_the_step_tells_that_its_network_is_trained() -> None:
    first, second = square(), square()
    optimizer = torch.optim.SGD(first.parameters())
    late = []

    def step() -> None:
        second(first(torch.ones(8, 64))).sum().backward()
        late.append(torch.optim.SGD(second.parameters()))
        late[0].step()

    assert {"(Sequential).0", "(Sequential 2).0"} <= paths_of(step)
    del optimizer


def test_many_networks_are_found_in_one_search_and_named_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search looks at all objects of the process: one for each network took most of a traced step."""
    searches = []
    search = module_names.ModuleParents._search
    monkeypatch.setattr(
        module_names.ModuleParents, "_search", lambda self: (searches.append(1), search(self))
    )
    networks = [nn.Linear(4, 4) for _ in range(50)]

    def step() -> None:
        rows = torch.ones(8, 4)
        for network in networks:
            rows = network(rows)
        rows.sum().backward()

    paths = paths_of(step)
    assert {"(Linear)", "(Linear 2)", "(Linear 50)"} <= paths
    assert len(searches) == 1


def test_networks_that_are_made_in_the_step_do_not_cost_a_search_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []
    search = module_names.ModuleParents._search
    monkeypatch.setattr(
        module_names.ModuleParents, "_search", lambda self: (searches.append(1), search(self))
    )
    kept = nn.Linear(4, 4)

    def step() -> None:
        for _ in range(20):
            nn.Linear(4, 4)(kept(torch.ones(8, 4))).sum().backward()

    paths = paths_of(step)
    assert len(searches) <= 3
    assert "(Linear 2)" in paths
    assert "(Linear 4)" not in paths  # the number of a deleted network is free again


def test_the_place_of_a_shared_module_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    length = module_names.common_length
    monkeypatch.setattr(
        module_names, "common_length", lambda *paths: (compared.append(1), length(*paths))[1]
    )
    shared = nn.Linear(4, 4)
    model = nn.Sequential(*[shared] * 50)
    paths_of(lambda: model(torch.ones(8, 4)).sum().backward(), model)
    assert len(compared) <= 100
