"""Losses that are high, noisy, tiny or rising, and as they should be."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.data import Batches, Pair, images, linear_targets, shipped, waves
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import LastOfRecurrent, convolutional, dense
from benchmarks.detection.programs import Clock, Recorder, loop


@healthy(
    "moving_targets", "temporal differences: values grow, so the loss rises from near zero and stays noisy"
)
def moving_targets(recorder: Recorder, seed: int, clock: Clock) -> None:
    """800 updates of Q-values on a ring of states, with a target network."""
    generator = torch.Generator().manual_seed(seed)
    online, target = dense([12, 48, 2]), dense([12, 48, 2])
    target.load_state_dict(online.state_dict())
    optimizer = Adam(online.parameters(), 2e-3)
    recorder.watch(online, optimizer)
    states = torch.eye(12)
    for step in range(800):
        place = torch.randint(0, 12, (32,), generator=generator)
        action = torch.randint(0, 2, (32,), generator=generator)
        after = (place + 2 * action - 1) % 12
        reward = (after == 0).float() * 10
        with torch.no_grad():
            wanted = reward + 0.95 * target(states[after]).max(1).values
        valued = online(states[place]).gather(1, action.view(-1, 1)).view(-1)
        loss = functional.smooth_l1_loss(valued, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            target.load_state_dict(online.state_dict())
        recorder.log(loss=loss, reward=float(reward.mean()))
        clock.step()


@healthy("actor_and_critic", "a policy's gain and a value's error in one loss, which turns negative at times")
def actor_and_critic(recorder: Recorder, seed: int, clock: Clock) -> None:
    """700 updates on a contextual bandit with three arms."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.randn(5, 3, generator=generator)
    model = dense([5, 32, 4], nn.Tanh)
    optimizer = Adam(model.parameters(), 3e-3)
    recorder.watch(model, optimizer)
    for _ in range(700):
        context = torch.randn(16, 5)
        output = model(context)
        chances = torch.distributions.Categorical(logits=output[:, :3])
        chosen = chances.sample()
        reward = (context @ best).gather(1, chosen.view(-1, 1)).view(-1)
        gain = reward - output[:, 3]
        loss = -(chances.log_prob(chosen) * gain.detach()).mean() + 0.5 * gain.pow(2).mean()
        optimizer.zero_grad()
        (loss - 0.01 * chances.entropy().mean()).backward()
        optimizer.step()
        recorder.log(loss=loss)
        clock.step()


@healthy(
    "thousands_by_small_rate",
    "targets in the hundreds and summed errors, under a rate that fits: gradients in the ten thousands",
)
def thousands_by_small_rate(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps of SGD at 2e-5."""
    x, y = linear_targets(seed, 600, 12)
    model = dense([12, 32, 1], nn.Tanh)
    optimizer = SGD(model.parameters(), 2e-5)

    def summed(output: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(output, wanted, reduction="sum")

    loop(recorder, clock, (model, optimizer, summed, Batches(x, y, 32, 500, seed)))


@healthy(
    "bytes_that_train", "pixels from 0 to 255 as they are: a high first loss, and Adam learns all the same"
)
def bytes_that_train(recorder: Recorder, seed: int, clock: Clock) -> None:
    """600 steps of a small network at 3e-4."""
    (x, y), (unseen, labels) = shipped("digits", seed, scaled=False)
    model = dense([64, 64, 10])
    batches = Batches(x * (255 / 16), y, 32, 600, seed, (unseen * (255 / 16), labels))
    loop(recorder, clock, (model, Adam(model.parameters(), 3e-4), functional.cross_entropy, batches))


@healthy("batches_of_two", "batches of two: from step to step the loss changes tenfold while it falls")
def batches_of_two(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,000 steps of SGD at a rate that fits them."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 48, 10])
    loop(
        recorder,
        clock,
        (
            model,
            SGD(model.parameters(), 0.03),
            functional.cross_entropy,
            Batches(*data, 2, 1000, seed, unseen),
        ),
    )


@healthy(
    "one_regression_at_a_time", "batches of one in a noisy regression: squared errors of single examples"
)
def one_regression_at_a_time(recorder: Recorder, seed: int, clock: Clock) -> None:
    """800 steps of SGD with batches of one."""
    data, unseen = shipped("diabetes", seed)
    model = nn.Linear(10, 1)
    loop(
        recorder,
        clock,
        (model, SGD(model.parameters(), 0.003), functional.mse_loss, Batches(*data, 1, 800, seed, unseen)),
    )


@healthy("spike_and_recovery", "the first large steps throw the loss up; it comes down to a flatter place")
def spike_and_recovery(recorder: Recorder, seed: int, clock: Clock) -> None:
    """400 steps at a rate near the edge of stability."""
    data, unseen = images(seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.4, momentum=0.9)
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 64, 400, seed, unseen)))


@healthy(
    "scaled_down_loss",
    "the loss is a weighted term of 1e-4: losses and gradients are tiny, Adam does not mind",
)
def scaled_down_loss(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps of a convolutional network."""
    data, unseen = images(seed)
    model = convolutional()

    def small(output: Tensor, labels: Tensor) -> Tensor:
        return 1e-4 * functional.cross_entropy(output, labels)

    loop(
        recorder, clock, (model, Adam(model.parameters(), 1e-3), small, Batches(*data, 32, 500, seed, unseen))
    )


@healthy(
    "harder_by_and_by",
    "a curriculum: each hundred steps longer and noisier waves join, and the loss leaps up",
)
def harder_by_and_by(recorder: Recorder, seed: int, clock: Clock) -> None:
    """700 steps of a GRU; noise grows."""
    (x, y), unseen = waves(seed, 2000, 24), waves(seed + 50, 200, 24)

    def harder(step: int, inputs: Tensor, labels: Tensor) -> Pair:
        return inputs + 0.1 * (step // 100) * torch.randn_like(inputs), labels

    model = LastOfRecurrent(nn.GRU(1, 24, batch_first=True), 24, 2)
    batches = Batches(x, y, 32, 700, seed, unseen, change=harder)
    loop(recorder, clock, (model, Adam(model.parameters(), 5e-3), functional.cross_entropy, batches))


@healthy("strong_decay", "weight decay shrinks weights tenfold while the loss is already flat")
def strong_decay(recorder: Recorder, seed: int, clock: Clock) -> None:
    """800 steps of AdamW with a decay of 0.5."""
    data, unseen = shipped("breast_cancer", seed)
    model = dense([30, 64, 2])
    optimizer = AdamW(model.parameters(), 3e-3, weight_decay=0.5)
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 800, seed, unseen)))
