"""Faults in how a training is driven: optimizers, rates, precision, order of batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from benchmarks.detection.data import Batches, blobs, images, shipped
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.programs import VALIDATED_EVERY, Built, Clock, Recorder, loop
from benchmarks.detection.published.pairs import published, published_loop


@published_loop(
    "loop_without_zero_grad",
    {"oscillating_loss"},
    "Stack Overflow 48001598; Karpathy, common neural net mistakes (2018): forgot to zero the gradients",
    "gradients of all steps add up",
)
def without_zero_grad(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """The sum of all gradients acts like momentum without friction: the loss swings, ever wider."""
    (x, y), _ = shipped("digits", seed)
    model = dense([64, 32, 10], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.1)
    recorder.watch(model, optimizer)
    for inputs, labels in Batches(x, y, 32, 300, seed):
        loss = functional.cross_entropy(model(inputs), labels)
        if not faulty:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@published_loop(
    "loop_schedule_by_batch",
    {"weight_not_updating"},
    "PyTorch's documentation of lr_scheduler (step it once an epoch) and its forum: stepped once a batch",
    "StepLR(20, 0.1), meant in epochs, is stepped after each batch",
    onset=60,
)
def schedule_by_batch(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """After a hundred steps the rate is a millionth and weights stand still while the loss is high."""
    (x, y), unseen = shipped("digits", seed)
    model = dense([64, 32, 10])
    optimizer = SGD(model.parameters(), 0.1)
    schedule = StepLR(optimizer, 20, 0.1)
    recorder.watch(model, optimizer)
    for step, (inputs, labels) in enumerate(Batches(x, y, 32, 400, seed)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if faulty or step % 42 == 41:
            schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        if step % VALIDATED_EVERY == 0:
            with torch.no_grad():
                recorder.log(loss=functional.cross_entropy(model(unseen[0]), unseen[1]), mode="eval")
        clock.step()


@published(
    "loop_head_replaced_after_optimizer",
    {"weight_not_updating"},
    "PyTorch's forum, questions on fine-tuning; kind also in TrainCheck (OSDI 2025): weights that silently never change",
    "the optimizer was made before the last layer was exchanged",
)
def head_replaced_after_optimizer(seed: int, faulty: bool) -> Built:
    """The new layer has gradients and never changes."""
    data, unseen = images(seed)
    model = convolutional()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    model[5] = nn.Linear(256, 10)
    if not faulty:
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


class Detached(nn.Module):
    """An encoder and a head; gradients may be cut between them."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.cut = dense([64, 32, 8], nn.Tanh), nn.Linear(8, 10), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.tanh(self.encoder(x))
        if self.cut:
            features = features.detach()
        return self.head(features)  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "loop_detached_encoder",
    {"weight_not_updating"},
    "Stack Overflow and PyTorch's forum, many times: .detach() or .data between two parts of a model",
    "features are detached before the head",
)
def detached_encoder(seed: int, faulty: bool) -> Built:
    """The encoder's parameters are in the optimizer, and no gradient ever reaches them."""
    data, unseen = shipped("digits", seed)
    model = Detached(cut=faulty)
    return (
        model,
        Adam(model.parameters(), 3e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "loop_bfloat16_weights",
    {"weight_not_updating"},
    "Zamirai et al., Revisiting BFloat16 training (2020): updates are rounded away",
    "weights in bfloat16, updated without a copy in float32, at a small rate",
)
def bfloat16_weights(seed: int, faulty: bool) -> Built:
    """An update below 1/512 of its weight leaves it as it was."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    model = dense([64, 64, 10])
    if faulty:
        model, x, unseen = model.bfloat16(), x.bfloat16(), unseen.bfloat16()
    optimizer = SGD(model.parameters(), 1e-4 if faulty else 0.1)
    return model, optimizer, functional.cross_entropy, Batches(x, y, 32, 250, seed, (unseen, labels))


@published(
    "loop_float16_adam",
    {"nan_or_inf"},
    "PyTorch's forum and apex's issues: Adam's epsilon of 1e-8 is zero in float16",
    "model and optimizer in float16",
)
def float16_adam(seed: int, faulty: bool) -> Built:
    """Where the second moment rounds to zero the update is 0/0."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    model = dense([64, 48, 10])
    if faulty:
        model, x, unseen = model.half(), x.half(), unseen.half()
    optimizer = Adam(model.parameters(), 1e-3)
    return model, optimizer, functional.cross_entropy, Batches(x, y, 32, 200, seed, (unseen, labels))


@published(
    "loop_gradient_ascent",
    {"loss_not_decreasing"},
    "Humbatova et al. (ICSE 2020), wrong loss; reward and loss exchanged",
    "the optimizer maximises what is a loss",
)
def gradient_ascent(seed: int, faulty: bool) -> Built:
    """The loss only rises."""
    data, unseen = blobs(seed, 600), blobs(seed, 600)
    model = dense([8, 32, 4], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.02, maximize=faulty)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


@published(
    "loop_labels_of_other_examples",
    {"loss_not_decreasing"},
    "Humbatova et al. (ICSE 2020), training data: wrong labels; inputs and labels shuffled apart",
    "labels are shuffled without their inputs",
)
def labels_of_other_examples(seed: int, faulty: bool) -> Built:
    """There is nothing to learn but the classes' shares."""
    (x, y), unseen = images(seed)

    def apart(_step: int, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, labels[torch.randperm(len(labels))]

    batches = Batches(x, y, 32, 250, seed, unseen, change=apart if faulty else None)
    model = convolutional()
    return model, SGD(model.parameters(), 0.1), functional.cross_entropy, batches


@published(
    "loop_sorted_by_class",
    {"oscillating_loss"},
    "UMLAUT (CHI 2021), data not shuffled; Humbatova et al. (ICSE 2020), training process",
    "batches come sorted by class",
)
def sorted_by_class(seed: int, faulty: bool) -> Built:
    """The network learns the class at hand and forgets the others: the loss leaps at each new one."""
    (x, y), unseen = shipped("digits", seed)
    if faulty:
        order = torch.argsort(y, stable=True)
        x, y = x[order], y[order]
    model = dense([64, 48, 10])
    batches = Batches(x, y, 32, 420, seed, unseen, shuffle=not faulty)
    return model, SGD(model.parameters(), 0.1), functional.cross_entropy, batches


@published(
    "loop_batches_of_one",
    {"oscillating_loss"},
    "DeepFD (ICSE 2022), batch size and learning rate; TheDeepChecker (TOSEM 2022), unstable loss",
    "one example a batch, with the rate and momentum of a batch of 32",
)
def batches_of_one(seed: int, faulty: bool) -> Built:
    """Each example throws the weights over what the last one taught."""
    data, unseen = shipped("wine", seed)
    model = dense([13, 32, 3])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, functional.cross_entropy, Batches(*data, 1 if faulty else 32, 400, seed, unseen)


@published_loop(
    "loop_summed_loss",
    {"exploding_gradient"},
    "PyTorch's forum: reduction='sum' under a learning rate that was found for a mean",
    "the loss is a sum over 64 examples",
)
def summed_loss(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """The rate is 64 times what it was meant to be."""
    data, unseen = images(seed)
    model = convolutional(nn.Tanh)
    optimizer = SGD(model.parameters(), 0.05)
    criterion = nn.CrossEntropyLoss(reduction="sum" if faulty else "mean")
    loop(recorder, clock, (model, optimizer, criterion, Batches(*data, 64, 250, seed, unseen)))
