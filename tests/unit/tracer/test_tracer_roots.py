"""Networks that are traced without being named: their choice, and the memory counted as theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memlog import MemoryTracer


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
        name = "first" if not share.path.startswith("(") else share.path.partition(".")[0]
        sizes[name, share.category] = sizes.get((name, share.category), 0) + share.size
    for name in ("first", "(Sequential)"):
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
        "Sequential",
        "(Sequential)",
        "(Sequential 2)",
        "(MSELoss)",
        "(Sequential 2).0",
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
