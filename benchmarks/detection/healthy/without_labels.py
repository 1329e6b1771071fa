"""Games, rewards, pairs and reconstructions: losses that need not fall, or not to zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from benchmarks.detection.data import Batches, moons, shipped
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import dense
from benchmarks.detection.programs import Clock, Recorder, loop


@healthy("adversarial_moons", "two networks against each other: neither loss falls")
def adversarial_moons(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of a GAN on two moons."""
    real, _ = moons(seed, 2000, 0.05)
    generator = dense([4, 48, 48, 2], lambda: nn.LeakyReLU(0.2))
    critic = dense([2, 48, 48, 1], lambda: nn.LeakyReLU(0.2))
    makes = Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
    judges = Adam(critic.parameters(), 1e-3, betas=(0.5, 0.99))
    recorder.watch(critic, judges, name="critic")
    recorder.watch(generator, makes, name="generator")
    loss_of = functional.binary_cross_entropy_with_logits
    for _ in range(1500):
        made = generator(torch.randn(64, 4))
        shown = real[torch.randint(0, len(real), (64,))]
        judged, faked = critic(shown), critic(made.detach())
        critic_loss = loss_of(judged, torch.ones(64, 1)) + loss_of(faked, torch.zeros(64, 1))
        judges.zero_grad()
        critic_loss.backward()
        judges.step()
        generator_loss = loss_of(critic(made), torch.ones(64, 1))
        makes.zero_grad()
        generator_loss.backward()
        makes.step()
        recorder.log(critic_loss=critic_loss, generator_loss=generator_loss)
        clock.step()


@healthy("reinforced_walk", "REINFORCE with a baseline: the loss is noise around zero while the reward rises")
def reinforced_walk(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 updates on contextual bandits with eight arms."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randn(6, 8, generator=generator)
    model = dense([6, 32, 8], nn.Tanh)
    optimizer = Adam(model.parameters(), 3e-3)
    recorder.watch(model, optimizer)
    baseline = 0.0
    for _ in range(1200):
        context = torch.randn(32, 6)
        chances = torch.distributions.Categorical(logits=model(context))
        chosen = chances.sample()
        reward = (context @ arms).gather(1, chosen.view(-1, 1)).view(-1) + 0.5 * torch.randn(32)
        loss = -(chances.log_prob(chosen) * (reward - baseline)).mean()
        baseline = 0.95 * baseline + 0.05 * float(reward.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss, reward=float(reward.mean()))
        clock.step()


@healthy(
    "value_learning",
    "targets move with the network that is trained (Q-learning): the loss rises as values grow",
)
def value_learning(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 updates on a ring of twelve places, with a target network that is copied every 100."""
    model, target = dense([12, 32, 3]), dense([12, 32, 3])
    target.load_state_dict(model.state_dict())
    optimizer = Adam(model.parameters(), 2e-3)
    recorder.watch(model, optimizer)
    places = torch.eye(12)
    for step in range(1500):
        place, action = torch.randint(0, 12, (32,)), torch.randint(0, 3, (32,))
        after = (place + action - 1) % 12
        reward = (after == seed % 12).float()
        with torch.no_grad():
            wanted = reward + 0.9 * target(places[after]).max(1).values
        value = model(places[place]).gather(1, action.view(-1, 1)).view(-1)
        loss = functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            target.load_state_dict(model.state_dict())
        recorder.log(loss=loss)
        clock.step()


@healthy("contrastive_views", "InfoNCE: the loss begins at ln(64) and keeps a floor far above zero")
def contrastive_views(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,000 steps on two noisy views of each digit."""
    (x, _), _ = shipped("digits", seed)
    model = dense([64, 64, 16])
    optimizer = Adam(model.parameters(), 1e-3)
    recorder.watch(model, optimizer)
    for images, _same in Batches(x, x, 64, 1000, seed):
        one, other = (
            functional.normalize(model(images + 0.3 * torch.randn_like(images)), dim=1) for _ in range(2)
        )
        loss = functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(images)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        clock.step()


@healthy("autoencoder_digits", "a reconstruction loss that is small from the start")
def autoencoder_digits(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps through a bottleneck of eight."""
    (x, _), (unseen, _) = shipped("digits", seed)
    model = dense([64, 48, 8, 48, 64], nn.Tanh)
    optimizer = Adam(model.parameters(), 1e-3)
    loop(
        recorder,
        clock,
        (model, optimizer, functional.mse_loss, Batches(x, x, 32, 1500, seed, (unseen, unseen))),
    )


@healthy("negative_likelihood", "a Gaussian's negative logarithm of likelihood goes below zero")
def negative_likelihood(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of a regression that tells its own variance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1200, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) * 0.5 + (0.03 + 0.05 * x.abs()) * torch.randn(1200, 1, generator=generator)
    model = dense([1, 48, 48, 2], nn.Tanh)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mean, logarithm = outputs.chunk(2, 1)
        return (0.5 * logarithm + 0.5 * (targets - mean).pow(2) / logarithm.exp()).mean()

    optimizer = Adam(model.parameters(), 1e-3)
    batches = Batches(x[:1000], y[:1000], 64, 1500, seed, (x[1000:], y[1000:]))
    loop(recorder, clock, (model, optimizer, loss, batches))
