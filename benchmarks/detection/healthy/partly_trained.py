"""Models of which only a part is to learn, though all of it gets gradients; and rates that rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from benchmarks.detection.data import Batches, images, shipped, tokens_with_keyword
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.healthy.transfer import pretrained
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.programs import Clock, Recorder, loop


@healthy(
    "head_alone_in_the_optimizer",
    "all parameters get gradients, and the optimizer holds the head's on purpose",
)
def head_alone_in_the_optimizer(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps on trained convolutions."""
    (x, y), unseen = images(seed)
    model = convolutional()
    pretrained(model, Batches(x, y % 5, 32, 150, seed))
    model[5] = nn.Linear(256, 10)
    batches = Batches(x, y, 32, 500, seed, unseen)
    loop(recorder, clock, (model, Adam(model[5].parameters(), 1e-3), functional.cross_entropy, batches))


@healthy(
    "later_half_in_the_optimizer",
    "the first of four layers keep their random weights on purpose, without being frozen",
)
def later_half_in_the_optimizer(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps over random features."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 96, 48, 48, 10])
    optimizer = Adam([*model[4].parameters(), *model[6].parameters()], 2e-3)
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 500, seed, unseen)))


class Prompted(nn.Module):
    """A sentence's mean embedding, with a learnt vector added, through trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(24))
        self.embedding = nn.Embedding(60, 24)
        self.layers = dense([24, 32, 2], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embedding(x).mean(1) + self.prompt)  # type: ignore[no-any-return]  # as above


@healthy(
    "prompt_alone",
    "a learnt prompt at the input is all that the optimizer holds; what follows gets gradients, too",
)
def prompt_alone(recorder: Recorder, seed: int, clock: Clock) -> None:
    """400 steps with labels of which more are of one kind than before."""
    x, y = tokens_with_keyword(seed, 800, 12, 60)
    model = Prompted()
    pretrained(model, Batches(x, y, 32, 60, seed))
    kept = (y == 1) | (torch.arange(len(y)) % 3 == 0)
    batches = Batches(x[kept], y[kept], 32, 400, seed)
    loop(recorder, clock, (model, Adam([model.prompt], 1e-2), functional.cross_entropy, batches))


@healthy("adapter_between_layers", "a small adapter between trained layers is all that the optimizer holds")
def adapter_between_layers(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps on digits whose order of classes is turned around by pairs."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    trunk, head = (
        dense([64, 64, 64]),
        nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    pretrained(nn.Sequential(trunk, head), Batches(x, y, 32, 200, seed))
    adapter = nn.Linear(64, 64)
    with torch.no_grad():
        adapter.weight.copy_(torch.eye(64))
        adapter.bias.zero_()
    model = nn.Sequential(trunk, adapter, head)
    batches = Batches(x, y ^ 1, 32, 500, seed, (unseen, labels ^ 1))
    loop(recorder, clock, (model, Adam(adapter.parameters(), 2e-3), functional.cross_entropy, batches))


@healthy(
    "labels_turned_around",
    "a trained classifier learns the classes in another order: it begins sure and wrong",
)
def labels_turned_around(recorder: Recorder, seed: int, clock: Clock) -> None:
    """400 steps; the first loss is several times that of a guess."""
    (x, y), (unseen, labels) = images(seed)
    model = convolutional()
    pretrained(model, Batches(x, y, 32, 300, seed))
    batches = Batches(x, 9 - y, 32, 400, seed, (unseen, 9 - labels))
    loop(recorder, clock, (model, Adam(model.parameters(), 1e-3), functional.cross_entropy, batches))


@healthy("rate_at_rest", "the rate is annealed to zero, and the last fifth of the run goes on without any")
def rate_at_rest(recorder: Recorder, seed: int, clock: Clock) -> None:
    """500 steps, 400 of them annealed, the loss at a tenth of its beginning."""
    (x, y), _ = images(seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, 400)
    recorder.watch(model, optimizer)
    for step, (inputs, labels) in enumerate(Batches(x, y, 32, 460, seed)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step < 400:
            schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@healthy("linear_decay_of_noise", "the rate falls in a line to zero while noisy labels keep the loss high")
def linear_decay_of_noise(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,000 steps, a third of the labels drawn anew each time."""
    (x, y), _ = shipped("digits", seed)
    model = dense([64, 48, 10])
    optimizer = Adam(model.parameters(), 2e-3)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 1000))
    recorder.watch(model, optimizer)
    for inputs, labels in Batches(x, y, 32, 1000, seed):
        noisy = torch.where(torch.rand(len(labels)) < 0.33, torch.randint(0, 10, labels.shape), labels)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), noisy)
        loss.backward()
        optimizer.step()
        schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=noisy)
        clock.step()


@healthy(
    "encoder_every_tenth_step", "two optimizers: the encoder takes a step each tenth time, the head each time"
)
def encoder_every_tenth_step(recorder: Recorder, seed: int, clock: Clock) -> None:
    """600 steps."""
    (x, y), _ = shipped("digits", seed)
    model = dense([64, 64, 32, 10])
    slow, fast = (
        Adam([*model[0].parameters(), *model[2].parameters()], 3e-3),
        Adam(model[4].parameters(), 1e-3),
    )
    recorder.watch(model, fast)
    for step, (inputs, labels) in enumerate(Batches(x, y, 32, 600, seed)):
        loss = functional.cross_entropy(model(inputs), labels)
        fast.zero_grad()
        loss.backward()
        if step % 10 == 9:
            slow.step()
            slow.zero_grad()
        fast.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@healthy(
    "small_weights_that_grow", "weights begin at N(0, 0.02²) in two wide layers, and Adam takes off at once"
)
def small_weights_that_grow(recorder: Recorder, seed: int, clock: Clock) -> None:
    """400 steps."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 256, 256, 10], fill=lambda weight: nn.init.normal_(weight, 0.0, 0.02))
    loop(
        recorder,
        clock,
        (
            model,
            Adam(model.parameters(), 1e-3),
            functional.cross_entropy,
            Batches(*data, 32, 400, seed, unseen),
        ),
    )


@healthy(
    "small_policy_head", "the last layer begins a hundred times smaller than the others, as policies' do"
)
def small_policy_head(recorder: Recorder, seed: int, clock: Clock) -> None:
    """400 steps of orthogonal layers, the head with a gain of 0.01."""
    data, unseen = shipped("wine", seed)
    model = dense([13, 64, 64, 3], nn.Tanh, fill=lambda weight: nn.init.orthogonal_(weight, 2**0.5))
    nn.init.orthogonal_(model[4].weight, 0.01)  # type: ignore[arg-type]  # a Linear's
    loop(
        recorder,
        clock,
        (
            model,
            Adam(model.parameters(), 1e-3),
            functional.cross_entropy,
            Batches(*data, 32, 400, seed, unseen),
        ),
    )
