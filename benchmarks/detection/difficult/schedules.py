"""Rates, data, dropout and tasks that change by a plan: losses that rise because they are meant to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR

from benchmarks.detection.data import Batches, Pair, images, shipped, waves
from benchmarks.detection.models import LanguageModel, LastOfRecurrent, convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@difficult(
    "warm_restarts", "a rate that anneals to zero and restarts high: the loss leaps up each time (SGDR)"
)
def warm_restarts(run: Training) -> None:
    """490 steps, restarts after 70 and 210."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    optimizer = SGD(model.parameters(), 0.15, momentum=0.9)
    schedule = CosineAnnealingWarmRestarts(optimizer, 70, 2)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 490, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.9)


@difficult(
    "cyclical_rate", "the rate goes up and down by a factor of 100 each 80 steps, and the loss with it"
)
def cyclical_rate(run: Training) -> None:
    """480 steps of a triangular schedule (Smith, 2017)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.005, momentum=0.9)
    schedule = CyclicLR(optimizer, 0.005, 0.5, 40)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 480, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "rate_found_by_warmup_of_100",
    "a warm-up takes the rate from a hundredth to its peak in 60 steps: 100 times as high, as planned",
)
def rate_found_by_warmup_of_100(run: Training) -> None:
    """400 steps of a language model by AdamW, with inverse square root decay."""
    generator = run.generator()
    start = torch.randint(0, 20, (800, 1), generator=generator)
    tokens = (start + torch.arange(13) * (1 + start % 3)) % 20
    model = LanguageModel(20, 12, 32, 1)
    optimizer = AdamW(model.parameters(), 5e-3)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 60, (60 / (step + 1)) ** 0.5))
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(tokens[:, :-1], tokens[:, 1:], 24, 400, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.log(loss=loss, lr=schedule.get_last_lr()[0])
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], losses[-1], at_most=0.6)


@difficult(
    "dropout_grows", "dropout grows from 0 to 0.6 while training: the loss rises, and what counts gets better"
)
def dropout_grows(run: Training) -> None:
    """480 steps."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), dropout, nn.Linear(128, 10))
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 480, run.seed)):
        dropout.p = min(0.6, 0.1 * (step // 60))
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.92)


@difficult(
    "longer_and_longer", "a curriculum: sequences get longer each 100 steps, and the loss leaps up each time"
)
def longer_and_longer(run: Training) -> None:
    """400 steps of a GRU that says whether the sum of numbers is positive."""
    generator = run.generator()
    model = LastOfRecurrent(nn.GRU(1, 24, batch_first=True), 24, 2)
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)

    def drawn(length: int, count: int) -> Pair:
        x = torch.randn(count, length, 1, generator=generator)
        return x, (x.sum((1, 2)) > 0).long()

    for step in range(400):
        inputs, wanted = drawn(3 + 5 * (step // 100), 32)
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy on the longest", 0.5, _accuracy(model, *drawn(18, 500)), at_least=0.85)


@difficult(
    "sixteen_examples",
    "a sanity check that a model can memorise sixteen examples: the loss goes to 1e-4, again and again the same batch",
)
def sixteen_examples(run: Training) -> None:
    """400 steps, the validation shows no better result and is not expected to."""
    (x, y), _ = images(run.seed)
    model = convolutional()
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x[:16], y[:16], 16, 400, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], losses[-1], at_most=1e-2)


@difficult(
    "same_order_each_epoch",
    "batches come in one order each epoch, hard ones at its end: the loss has a period",
)
def same_order_each_epoch(run: Training) -> None:
    """504 steps of 12 epochs; examples are sorted by their own noise."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    noise = torch.linspace(0, 0.8, len(x))[:, None] * torch.randn(x.shape, generator=run.generator())
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x + noise, y, 32, 504, run.seed, shuffle=False):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.record(labels=wanted)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "batch_size_grows", "batches grow from 4 to 128 instead of a rate that falls: noise shrinks by steps"
)
def batch_size_grows(run: Training) -> None:
    """420 steps (Smith et al., 2018)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.1)
    generator = run.generator()
    run.watch(model, optimizer)
    for step in range(420):
        size = 4 * 2 ** min(5, step // 70)
        at = torch.randint(0, len(x), (size,), generator=generator)
        loss = functional.cross_entropy(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.9)


@difficult(
    "three_tasks_and_weights", "three losses with weights that a plan changes: their sum rises by the plan"
)
def three_tasks_and_weights(run: Training) -> None:
    """450 steps: a class, whether it is even, and a reconstruction, whose weight grows from 0 to 20."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = nn.ModuleDict(
        {
            "trunk": dense([64, 48, 32]),
            "class": nn.Linear(32, 10),
            "even": nn.Linear(32, 1),
            "image": nn.Linear(32, 64),
        }
    )
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 450, run.seed)):
        run.hook.begin_pass()
        hidden = model["trunk"](inputs).relu()
        by_class = functional.cross_entropy(model["class"](hidden), wanted)
        even = functional.binary_cross_entropy_with_logits(model["even"](hidden)[:, 0], (wanted % 2).float())
        image = functional.mse_loss(model["image"](hidden), inputs)
        loss = by_class + 0.5 * even + min(20.0, 0.08 * step) * image
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, loss_of_class=by_class, loss_of_even=even, loss_of_image=image)
        run.step()
    with torch.no_grad():
        accuracy = (model["class"](model["trunk"](unseen).relu()).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.88)


@difficult(
    "one_task_after_another",
    "continual learning: other classes come each 130 steps, and the loss leaps to three times its first",
)
def one_task_after_another(run: Training) -> None:
    """390 steps in three parts; what counts is what was learnt of the last."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.05)
    run.watch(model, optimizer)
    for part in range(3):
        chosen = (y >= 3 * part) & (y < 3 * part + 4)
        for inputs, wanted in Batches(x[chosen], y[chosen], 32, 130, run.seed + part):
            loss = functional.cross_entropy(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.step()
    last = labels >= 6
    run.improves(
        "accuracy on the last classes", 0.1, _accuracy(model, unseen[last], labels[last]), at_least=0.8
    )


@difficult(
    "validated_each_third_step",
    "a validation on another kind of data each third step: its loss is twice as high, and flat",
)
def validated_each_third_step(run: Training) -> None:
    """360 steps of a GRU; waves for validation are much noisier."""
    (x, y), (unseen, labels) = waves(run.seed, 1200, 16), waves(run.seed + 40, 100, 16)
    noisy = unseen + 1.0 * torch.randn(unseen.shape, generator=run.generator())
    model = LastOfRecurrent(nn.GRU(1, 16, batch_first=True), 16, 2)
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(
        Batches(x + 0.5 * torch.randn(x.shape, generator=run.generator(1)), y, 32, 360, run.seed)
    ):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                run.log(mode="eval", loss=functional.cross_entropy(model(noisy), labels))
            model.train()
        run.step()
    run.improves("accuracy", 0.5, _accuracy(model, unseen, labels), at_least=0.8)
