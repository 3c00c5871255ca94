"""Which phase of a PPO loop makes the peak: rollout, advantages or update? Runs on a CPU in seconds.

    python examples/ppo_phases.py

A small policy learns to keep a pole upright (the usual equations of the cart). Each iteration plays several
carts at once, computes advantages, and updates the policy in minibatches. ``memlog.phase`` marks the phases.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import memlog

STEPS = 64
"""Steps of the environment in one rollout."""


class Carts:
    """Carts with a pole, simulated together. A cart begins again when its pole has fallen.

    Args:
        count: Number of carts.
    """

    def __init__(self, count: int) -> None:
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart to the left (0) or right (1); return the rewards, and which poles have fallen."""
        _, velocity, angle, spin = self.state.unbind(1)
        push = (action.float() * 2 - 1) * 10
        pressed = (push + 0.05 * spin**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * pressed) / (
            0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
        )
        speed_up = pressed - 0.05 * turn * angle.cos() / 1.1
        change = torch.stack([velocity, speed_up, spin, turn], 1)
        self.state = self.state + 0.02 * change
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state[fallen] = torch.empty(int(fallen.sum()), 4).uniform_(-0.05, 0.05)
        return 1 - fallen.float(), fallen


class Policy(nn.Module):
    """Two networks of the same shape: one chooses actions, one estimates values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = _network(width, 2)
        self.critic = _network(width, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        actions = torch.distributions.Categorical(logits=self.actor(state))
        return actions, self.critic(state).squeeze(-1)


def _network(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


@torch.no_grad()
def rollout(policy: Policy, carts: Carts) -> dict[str, torch.Tensor]:
    """Play, and return states, actions, their log-probabilities, values, rewards and ends: steps x carts."""
    played: list[tuple[torch.Tensor, ...]] = []
    for _ in range(STEPS):
        state = carts.state
        actions, value = policy(state)
        action = actions.sample()
        reward, fallen = carts.step(action)
        played.append((state, action, actions.log_prob(action), value, reward, fallen))
    names = ("state", "action", "log_prob", "value", "reward", "fallen")
    return {
        name: torch.stack(parts)
        for name, parts in zip(names, zip(*played, strict=True), strict=True)
    }


@torch.no_grad()
def advantages(played: dict[str, torch.Tensor], last_value: torch.Tensor) -> torch.Tensor:
    """Return the generalised advantage estimates, steps x carts."""
    found = torch.zeros_like(played["reward"])
    after, running = last_value, torch.zeros_like(last_value)
    for step in reversed(range(STEPS)):
        alive = 1 - played["fallen"][step].float()
        error = played["reward"][step] + 0.99 * after * alive - played["value"][step]
        running = error + 0.99 * 0.95 * alive * running
        found[step], after = running, played["value"][step]
    return found


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    played: dict[str, torch.Tensor],
    gains: torch.Tensor,
    minibatches: int,
) -> None:
    """Update the policy with PPO's clipped objective."""
    flat = {name: part.flatten(0, 1) for name, part in played.items()}
    gain, target = gains.flatten(), gains.flatten() + flat["value"]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    for chosen in torch.randperm(len(gain)).chunk(minibatches):
        actions, value = policy(flat["state"][chosen])
        ratio = (actions.log_prob(flat["action"][chosen]) - flat["log_prob"][chosen]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * gain[chosen], clipped * gain[chosen]).mean()
        loss = loss + 0.5 * (value - target[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show which phase of a PPO loop makes the peak.")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--carts", type=int, default=1536)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    memlog.init(name="ppo")
    policy, carts = Policy(args.width), Carts(args.carts)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for iteration in range(args.iterations):
        with memlog.phase("rollout"):
            played = rollout(policy, carts)
        with memlog.phase("learn"):
            with memlog.phase("advantages"), torch.no_grad():
                gains = advantages(played, policy(carts.state)[1])
            with memlog.phase("update"):
                update(policy, optimizer, played, gains, args.minibatches)
        falls = int(played["fallen"].sum())
        print(
            f"iteration {iteration}: {falls:,} of {played['fallen'].numel():,} steps end in a fall"
        )
    memlog.finish()


if __name__ == "__main__":
    main()
