"""Outputs that hardly differ between examples, and parts with gradients that end, on purpose."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from benchmarks.detection.data import Batches, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult


@difficult("constant_regression_of_many", "sixteen targets differ by a thousandth of their size")
def constant_regression_of_many(run: Training) -> None:
    """600 steps; what differs is learned after the constants."""
    generator = run.generator()
    x = torch.randn(1500, 12, generator=generator)
    y = 10 + torch.arange(16) + 0.02 * torch.tanh(x @ torch.randn(12, 16, generator=generator) / 3)
    model = dense([12, 64, 16])
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 64, 600, run.seed):
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("error", losses[0], sum(losses[-20:]) / 20, at_most=0.3)


@difficult("rare_labels_of_many", "each of 500 labels is rare: all scores are far below zero for a long time")
def rare_labels_of_many(run: Training) -> None:
    """500 steps of a classifier of several labels."""
    (x, y), _ = shipped("digits", run.seed)
    rare = torch.randint(0, 50, (len(x),), generator=run.generator())
    wanted = functional.one_hot(50 * y + rare, 500).float()
    model = dense([64, 64, 500])
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = []
    for inputs, targets in Batches(x, wanted, 64, 500, run.seed):
        loss = functional.binary_cross_entropy_with_logits(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-20:]) / 20, at_most=0.02)


class Queried(nn.Module):
    """A learned query reads tokens by attention: pixels (n, 64) to logits (n, 10). The query's projection sees no example."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.query = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 32)
        self.rows, self.values, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x.view(-1, 8, 8)).relu()
        query = self.query(self.token.expand(len(x), 1, 32))
        weights = (query @ rows.transpose(1, 2) / 32**0.5).softmax(-1)
        scores: Tensor = self.head((weights @ self.values(rows)).flatten(1).relu())
        return scores


@difficult("masked_latents", "a query token is the same for every example, and so is its projection")
def query_token(run: Training) -> None:
    """500 steps of a classifier that pools rows of digits by attention."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Queried()
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    for inputs, targets in Batches(x, y, 32, 500, run.seed):
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        accuracy = float((model(unseen).argmax(1) == labels).float().mean())
    run.improves("accuracy", None, accuracy, at_least=0.5)


@difficult(
    "two_models_one_on_noise",
    "one of two models has learned its task, and the other one learns noise: its loss does not fall",
)
def two_models_one_on_noise(run: Training) -> None:
    """500 steps with a backward pass for each model."""
    draws = run.generator()
    learns, guesses = dense([8, 32, 1]), dense([8, 32, 1])
    model = nn.ModuleDict({"learns": learns, "guesses": guesses})
    one, other = Adam(learns.parameters(), 1e-2), Adam(guesses.parameters(), 1e-3)
    run.watch(model)
    slope, losses = torch.randn(8, 1, generator=draws), []
    for _ in range(500):
        x = torch.randn(64, 8, generator=draws)
        loss = functional.mse_loss(learns(x), x @ slope)
        one.zero_grad()
        loss.backward()
        one.step()
        noise = functional.mse_loss(guesses(x), torch.randn(64, 1, generator=draws))
        other.zero_grad()
        noise.backward()
        other.step()
        losses.append(loss.item())
        run.step()
    run.improves("error", losses[0], losses[-1], at_most=0.05)


@difficult(
    "a2c_by_two_losses", "a policy becomes deterministic as its critic learns its values: both gradients end"
)
def a2c_by_two_losses(run: Training) -> None:
    """500 steps of contextual bandits, with a backward pass for the actor and one for the critic."""
    draws = run.generator()
    actor, critic = dense([6, 32, 3]), dense([6, 32, 1])
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    acts, judges = Adam(actor.parameters(), 1e-2), Adam(critic.parameters(), 1e-2)
    run.watch(model)
    rewards = []
    for _ in range(500):
        states = functional.one_hot(torch.randint(0, 6, (64,), generator=draws), 6).float()
        choices = torch.distributions.Categorical(logits=actor(states))
        chosen = choices.sample()
        reward = (chosen == states.argmax(1) % 3).float()[:, None]
        value = critic(states)
        loss = functional.mse_loss(value, reward)
        judges.zero_grad()
        loss.backward()
        judges.step()
        gain = -(choices.log_prob(chosen)[:, None] * (reward - value.detach())).mean()
        acts.zero_grad()
        gain.backward()
        acts.step()
        rewards.append(reward.mean().item())
        run.step()
    run.improves("reward", rewards[0], sum(rewards[-20:]) / 20, at_least=0.95)
