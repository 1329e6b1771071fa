"""Actors and critics that balance a pole: returns grow tenfold, and the critic's error, which leads the sum of losses, with them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult

CARTS = 16
_LONGEST = 200


class Carts:
    """Carts with a pole each, by the equations of Barto, Sutton and Anderson (1983).

    Attributes:
        state: place, speed, angle and its speed of each, shape (carts, 4).
        lengths: of the episodes that have ended, in steps.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._age = torch.zeros(CARTS)
        self.state = self._begun(CARTS)
        self.lengths: list[float] = []

    def _begun(self, count: int) -> Tensor:
        return 0.05 * torch.randn(count, 4, generator=self._generator)

    def step(self, action: Tensor) -> Tensor:
        """Push each cart to the left (0) or right (1); returns 1.0 for each whose episode ended."""
        place, speed, angle, turn = self.state.unbind(1)
        cosine, sine = angle.cos(), angle.sin()
        push = (20 * action.float() - 10 + 0.05 * turn**2 * sine) / 1.1
        turns = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speeds = push - 0.05 * turns * cosine / 1.1
        moves = torch.stack([speed, speeds, turn, turns], 1)
        self.state = torch.stack([place, speed, angle, turn], 1) + 0.02 * moves
        self._age += 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.pi / 15)
        ended = fallen | (self._age >= _LONGEST)
        self.lengths += self._age[ended].tolist()
        self.state[ended] = self._begun(int(ended.sum()))
        self._age[ended] = 0
        return ended.float()

    def judge(self, run: Training, at_least: float) -> None:
        """State how long episodes last."""
        first, last = self.lengths[:20], self.lengths[-30:]
        run.improves("episode length", sum(first) / 20, sum(last) / 30, at_least=at_least)


def _update(optimizer: torch.optim.Optimizer, model: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


@difficult(
    "cart_and_pole_a2c",
    "the sum of an actor's and a critic's losses leaps to many times its first as returns grow",
)
def advantages(run: Training) -> None:
    """350 updates of eight steps of each cart."""
    carts = Carts(run.generator())
    body, policy, value = nn.Sequential(nn.Linear(4, 64), nn.Tanh()), nn.Linear(64, 2), nn.Linear(64, 1)
    model = nn.ModuleDict({"body": body, "policy": policy, "value": value})
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    for _ in range(350):
        chances, values, entropies, ends = [], [], [], []
        for _ in range(8):
            hidden = body(carts.state)
            choice = Categorical(logits=policy(hidden))
            action = choice.sample()
            chances.append(choice.log_prob(action))
            values.append(value(hidden)[:, 0])
            entropies.append(choice.entropy())
            ends.append(carts.step(action))
        with torch.no_grad():
            sum_of_rewards = value(body(carts.state))[:, 0]
        returns: list[Tensor] = []
        for ended in reversed(ends):
            sum_of_rewards = 1 + 0.98 * sum_of_rewards * (1 - ended)
            returns.insert(0, sum_of_rewards)
        error = torch.stack(returns) - torch.stack(values)
        gain = (error - error.mean()).detach() / (error.std().detach() + 1e-6)
        policy_loss = -(torch.stack(chances) * gain).mean()
        value_loss = error.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * torch.stack(entropies).mean()
        _update(optimizer, model, loss)
        run.log(loss=loss, policy_loss=policy_loss, value_loss=value_loss)
        run.step()
    carts.judge(run, at_least=35)


@difficult(
    "ppo_with_a_tanh_critic", "hidden tanhs of a critic go to their bounds as it learns ever larger returns"
)
def proximal(run: Training) -> None:
    """24 rollouts of 32 steps, four epochs of each (PPO with generalized advantages)."""
    generator = run.generator()
    carts = Carts(generator)
    actor, critic = dense([4, 48, 48, 2], nn.Tanh), dense([4, 48, 48, 1], nn.Tanh)
    nn.init.orthogonal_(actor[4].weight, 0.01)  # type: ignore[arg-type]  # a layer's weight
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), 2.5e-3, eps=1e-5)
    run.watch(model, optimizer)
    for _ in range(24):
        states, actions, chances, ends = [], [], [], []
        with torch.no_grad():
            for _ in range(32):
                choice = Categorical(logits=actor(carts.state))
                action = choice.sample()
                states.append(carts.state)
                actions.append(action)
                chances.append(choice.log_prob(action))
                ends.append(carts.step(action))
            values = critic(torch.stack([*states, carts.state]))[..., 0]
        gains: list[Tensor] = []
        gain = torch.zeros(CARTS)
        for at in reversed(range(32)):
            goes_on = 1 - ends[at]
            gain = 1 + 0.99 * values[at + 1] * goes_on - values[at] + 0.99 * 0.95 * goes_on * gain
            gains.insert(0, gain)
        advantage = torch.stack(gains).flatten()
        returns = advantage + values[:-1].flatten()
        state, action, before = torch.cat(states), torch.cat(actions), torch.cat(chances)
        for _ in range(4):
            for part in torch.randperm(len(state), generator=generator).split(128):
                choice = Categorical(logits=actor(state[part]))
                ratio = (choice.log_prob(action[part]) - before[part]).exp()
                scaled = (advantage[part] - advantage[part].mean()) / (advantage[part].std() + 1e-8)
                policy_loss = -torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
                value_loss = functional.mse_loss(critic(state[part])[:, 0], returns[part])
                loss = policy_loss + 0.5 * value_loss - 0.01 * choice.entropy().mean()
                _update(optimizer, model, loss)
                run.log(loss=loss, policy_loss=policy_loss, value_loss=value_loss)
                run.step()
    carts.judge(run, at_least=45)
