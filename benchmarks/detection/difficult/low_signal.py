"""Little to be learnt from each batch: losses that fall by a few percent, and are right to."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.data import images, shipped
from benchmarks.detection.models import LanguageModel, convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


@difficult(
    "click_prediction", "clicks that are nearly noise: the loss goes from .691 to .665, and no further"
)
def click_prediction(run: Training) -> None:
    """600 steps of a factorised model over sparse categories, batches of 128."""
    generator = run.generator()
    fields, size = 6, 40
    x = torch.randint(0, size, (20_000, fields), generator=generator)
    weight = 0.22 * torch.randn(fields, size, generator=generator)
    logit = weight[torch.arange(fields), x].sum(1)
    y = torch.bernoulli(torch.sigmoid(logit), generator=generator)
    embedding = nn.Embedding(fields * size, 8)
    nn.init.normal_(embedding.weight, 0.0, 0.05)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(8 * fields, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    offset = size * torch.arange(fields)
    losses = []
    for _ in range(600):
        chosen = torch.randint(0, 18_000, (128,), generator=generator)
        loss = functional.binary_cross_entropy_with_logits(model(x[chosen] + offset)[:, 0], y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss of clicks", _mean(losses[:60]), _mean(losses[-100:]), at_most=0.688)


@difficult(
    "tokens_of_high_entropy", "a language of which most is random: the loss nears its entropy from close by"
)
def tokens_of_high_entropy(run: Training) -> None:
    """350 steps of a small transformer over a Markov chain with flat transitions."""
    generator = run.generator()
    words, length = 48, 16
    chances = functional.softmax(0.9 * torch.randn(words, words, generator=generator), 1)
    tokens = torch.zeros(4000, length + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, words, (4000,), generator=generator)
    for at in range(length):
        tokens[:, at + 1] = torch.multinomial(chances[tokens[:, at]], 1, generator=generator)[:, 0]
    model = LanguageModel(words, length, 32, 1)
    optimizer = AdamW(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    losses = []
    for _ in range(350):
        batch = tokens[torch.randint(0, 4000, (16,), generator=generator)]
        loss = functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], _mean(losses[-50:]), at_most=math.log(words) - 0.05)


@difficult(
    "preferences_dpo", "DPO: the loss goes from .693 to about .67 while the share of right preferences rises"
)
def preferences_dpo(run: Training) -> None:
    """600 steps of direct preference optimization (Rafailov et al., 2023) of a bigram policy, beta 0.1."""
    generator = run.generator()
    words, length = 32, 12
    model, reference = dense([words, 32, words]), dense([words, 32, words])
    reference.load_state_dict(model.state_dict())
    quality = torch.randn(words, generator=generator)
    pairs = torch.randint(0, words, (2000, 2, length), generator=generator)
    score = quality[pairs].mean(2) + 0.15 * torch.randn(2000, 2, generator=generator)
    better = score.argmax(1)
    chosen, rejected = pairs[torch.arange(2000), better], pairs[torch.arange(2000), 1 - better]
    optimizer = AdamW(model.parameters(), 3e-4)
    run.watch(model, optimizer)
    identity = torch.eye(words)

    def likelihood(policy: nn.Module, tokens: Tensor) -> Tensor:
        logits = functional.log_softmax(policy(identity[tokens[:, :-1]]), 2)
        return logits.gather(2, tokens[:, 1:, None])[..., 0].sum(1)

    losses, right = [], []
    for _ in range(600):
        batch = torch.randint(0, 2000, (16,), generator=generator)
        tokens = torch.cat([chosen[batch], rejected[batch]])
        with torch.no_grad():
            before = likelihood(reference, tokens)
        gain = 0.1 * (likelihood(model, tokens) - before)
        margin = gain[:16] - gain[16:]
        loss = -functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (margin > 0).float().mean().item()
        run.log(loss=loss, accuracy=accuracy)
        losses.append(loss.item())
        right.append(accuracy)
        run.step()
    run.improves("right preferences", 0.5, _mean(right[-100:]), at_least=0.65)
    run.improves("loss", losses[0], _mean(losses[-100:]), at_most=0.69)


@difficult("fine_tuned_at_1e-5", "a trained classifier meets a slight shift; at 1e-5 its loss creeps down")
def fine_tuned_at_1e_5(run: Training) -> None:
    """900 steps of AdamW."""
    (x, y), _ = images(run.seed)
    model = convolutional()
    before = Adam(model.parameters(), 1e-3)
    generator = run.generator()
    for _ in range(250):
        chosen = torch.randint(0, len(x), (32,), generator=generator)
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        before.zero_grad()
        loss.backward()
        before.step()
    x = 0.8 * x + 0.25
    first = functional.cross_entropy(model(x), y).item()
    optimizer = AdamW(model.parameters(), 1e-5)
    run.watch(model, optimizer)
    for _ in range(600):
        chosen = torch.randint(0, len(x), (16,), generator=generator)
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("loss of all", first, functional.cross_entropy(model(x), y).item(), at_most=0.97 * first)


@difficult(
    "returns_of_a_market", "a regression whose targets are 97 % noise: the mean squared error falls by 2 %"
)
def returns_of_a_market(run: Training) -> None:
    """800 steps of SGD with batches of 64."""
    generator = run.generator()
    x = torch.randn(12_000, 16, generator=generator)
    signal = x @ (torch.randn(16, generator=generator) / 4)
    y = 0.25 * signal / signal.std() + torch.randn(12_000, generator=generator)
    model = dense([16, 16, 1], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    unseen = x[10_000:], y[10_000:]

    def error() -> float:
        with torch.no_grad():
            return functional.mse_loss(model(unseen[0])[:, 0], unseen[1]).item()

    first = error()
    run.watch(model, optimizer)
    for step in range(800):
        chosen = torch.randint(0, 10_000, (64,), generator=generator)
        loss = functional.mse_loss(model(x[chosen])[:, 0], y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        if step % 50 == 0:
            run.log(loss=error(), mode="eval")
        run.step()
    run.improves("error on unseen", first, error(), at_most=0.985 * float(unseen[1].var()))


@difficult(
    "symmetric_label_noise", "40 % of labels are wrong and stay so: the loss stops at the noise's entropy"
)
def symmetric_label_noise(run: Training) -> None:
    """600 steps; accuracy on clean, unseen labels rises."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    generator = run.generator()
    wrong = torch.rand(len(y), generator=generator) < 0.4
    noisy = torch.where(wrong, torch.randint(0, 10, y.shape, generator=generator), y)
    model = nn.Sequential(dense([64, 32, 10]))
    optimizer = SGD(model.parameters(), 0.05)
    run.watch(model, optimizer)
    for _ in range(600):
        chosen = torch.randint(0, len(x), (32,), generator=generator)
        loss = functional.cross_entropy(model(x[chosen]), noisy[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.record(labels=noisy[chosen])
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy on clean labels", 0.1, accuracy, at_least=0.75)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
