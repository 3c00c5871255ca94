"""Training loops with one optimizer, several, and optimizers that step in unusual places."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters())


class Loop:
    optimizers: tuple[torch.optim.Optimizer, ...]

    def iterate(self) -> None:
        raise NotImplementedError

    def update(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @property
    def state(self) -> int:
        return sum(
            value.nbytes
            for optimizer in self.optimizers
            for kept in optimizer.state.values()
            for value in kept.values()
            if isinstance(value, Tensor)
        )


class ActorFirst(Loop):
    """A small and a large network. The small one steps first, before the large one has run."""

    def __init__(self) -> None:
        self.actor, self.critic = network(16, 32, 4), network(20, 512, 512, 1)
        self.optimizers = adam(self.actor), adam(self.critic)

    def iterate(self) -> None:
        batch = torch.ones(64, 16)
        action = self.actor(batch)
        self.update(-action.mean(), self.optimizers[0])
        value = self.critic(torch.cat([batch, action.detach()], dim=1))
        self.update(value.square().mean(), self.optimizers[1])


class CriticFirst(ActorFirst):
    """Actor and critic. The actor's loss goes through the critic, so the critic gets gradients of it."""

    def iterate(self) -> None:
        batch = torch.ones(64, 16)
        value = self.critic(torch.cat([batch, torch.ones(64, 4)], dim=1))
        self.update(value.square().mean(), self.optimizers[1])
        value = self.critic(torch.cat([batch, self.actor(batch)], dim=1))
        self.update(-value.mean(), self.optimizers[0])


class Adversarial(Loop):
    """A discriminator that steps several times for each step of the generator."""

    ratio = 1

    def __init__(self) -> None:
        self.made, self.judged = network(16, 256, 512), network(512, 256, 1)
        self.optimizers = adam(self.made), adam(self.judged)

    def iterate(self) -> None:
        for _ in range(self.ratio):
            false = self.made(torch.ones(32, 16)).detach()
            loss = self.judged(torch.ones(32, 512)).mean() - self.judged(false).mean()
            self.update(loss, self.optimizers[1])
        self.update(-self.judged(self.made(torch.ones(32, 16))).mean(), self.optimizers[0])


class FiveToOne(Adversarial):
    ratio = 5


class SparseAndDense(Loop):
    """A sparse and a dense optimizer. Both step after one backward pass, with no module call between them."""

    def __init__(self) -> None:
        self.words = nn.Embedding(2000, 32, sparse=True)
        self.head = network(32, 512, 512, 8)
        self.optimizers = torch.optim.SparseAdam(self.words.parameters()), adam(self.head)

    def iterate(self) -> None:
        loss = self.head(self.words(torch.arange(64))).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class Single(Loop):
    def __init__(self) -> None:
        self.net = network(16, 512, 512, 8)
        self.optimizers = (adam(self.net),)

    def iterate(self) -> None:
        self.update(self.net(torch.ones(64, 16)).square().mean(), self.optimizers[0])


class Accumulating(Single):
    def iterate(self) -> None:
        self.optimizers[0].zero_grad()
        for _ in range(4):
            self.net(torch.ones(16, 16)).square().mean().backward()
        self.optimizers[0].step()


class TwoOfOneModel(Single):
    """Two losses in turns over the same parameters. Each loss has its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = adam(self.net), adam(self.net)

    def iterate(self) -> None:
        for optimizer in self.optimizers:
            self.update(self.net(torch.ones(64, 16)).square().mean(), optimizer)


class InBackward(Loop):
    """An optimizer for each parameter, which steps as soon as the parameter's gradient is ready."""

    def __init__(self) -> None:
        self.net = network(16, *[64] * 40, 8)
        self.optimizers = tuple(torch.optim.Adam([one]) for one in self.net.parameters())
        for parameter, optimizer in zip(self.net.parameters(), self.optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(self.stepping(optimizer))

    def stepping(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return hook

    def iterate(self) -> None:
        self.net(torch.ones(64, 16)).square().mean().backward()


class Distilling(Single):
    """Distillation, which calls an untrained teacher before the network that it trains."""

    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad

    def __init__(self) -> None:
        super().__init__()
        self.teacher = network(16, 1024, 1024, 8).requires_grad_(False)

    def iterate(self) -> None:
        batch = torch.ones(128, 16)
        with self.mode():
            wanted = self.teacher(batch)
        self.update((self.net(batch) - wanted).square().mean(), self.optimizers[0])


class DistillingByInference(Distilling):
    mode = torch.inference_mode


class Lbfgs(Single):
    """Optimizer L-BFGS, which calls the model within its step."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = (torch.optim.LBFGS(self.net.parameters(), max_iter=3, history_size=3),)

    def iterate(self) -> None:
        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss: Tensor = self.net(torch.ones(64, 16)).square().mean()
            loss.backward()
            return loss

        self.optimizers[0].step(closure)  # type: ignore[arg-type] # a tensor is a float to it


ALONE = [Single, Accumulating, Lbfgs, Distilling, DistillingByInference]


SEVERAL = [
    ActorFirst,
    CriticFirst,
    Adversarial,
    FiveToOne,
    SparseAndDense,
    TwoOfOneModel,
    InBackward,
]
