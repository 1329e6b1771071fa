"""Weights that no step reaches."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from benchmarks.detection.data import Batches, images, shipped, tokens_with_keyword, waves
from benchmarks.detection.models import BagOfTokens, LastOfRecurrent, convolutional, dense
from benchmarks.detection.programs import Built, Clock, Recorder
from benchmarks.detection.published.pairs import published, published_loop


@published(
    "left_behind_new_head",
    {"weight_not_updating"},
    "PyTorch's documentation of torch.optim: construct it after the model's parameters are final; its tutorial on transfer learning replaces fc",
    "the last layer is replaced after the optimizer was made",
)
def new_head(seed: int, faulty: bool) -> Built:
    """The optimizer moves a layer that is not there any more; the new one stays random."""
    data, unseen = images(seed)
    model = convolutional()
    if not faulty:
        model[5] = nn.Linear(256, 10)
    optimizer = Adam(model.parameters(), 1e-4)
    if faulty:
        model[5] = nn.Linear(256, 10)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "left_behind_copied_model",
    {"weight_not_updating"},
    "PyTorch's documentation of torch.optim, on moving a model: its parameters are other objects afterwards",
    "the model was copied after the optimizer was made",
)
def copied_model(seed: int, faulty: bool) -> Built:
    """The optimizer holds the parameters of the copy's original."""
    data, unseen = shipped("wine", seed)
    model = dense([13, 32, 32, 3])
    optimizer = Adam(model.parameters(), 3e-3)
    if faulty:
        model = copy.deepcopy(model)
    return model, optimizer, functional.cross_entropy, Batches(*data, 16, 250, seed, unseen)


@published(
    "left_behind_forgotten_group",
    {"weight_not_updating"},
    "TrainCheck (OSDI 2025), kind: parameters that are in no optimizer; PyTorch's documentation of per-parameter options",
    "of three groups of parameters one is not given to the optimizer",
)
def forgotten_group(seed: int, faulty: bool) -> Built:
    """The middle of the network stays as it began."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 48, 48, 48, 10])
    optimizer = RMSprop(model[0].parameters(), 1e-3)
    optimizer.add_param_group({"params": model[6].parameters(), "lr": 1e-2})
    if not faulty:
        optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()]})
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


def scheduled(
    recorder: Recorder,
    clock: Clock,
    parts: tuple[nn.Module, torch.optim.Optimizer, LRScheduler | None],
    batches: Batches,
) -> None:
    """The plain loop, with a schedule that is stepped after each batch; None for none."""
    model, optimizer, schedule = parts
    recorder.watch(model, optimizer)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@published_loop(
    "left_behind_exponential_decay",
    {"weight_not_updating"},
    "PyTorch's documentation of lr_scheduler (step it once an epoch) and its forum: stepped once a batch",
    "ExponentialLR(0.85), meant in epochs, is stepped after each batch",
    onset=60,
)
def exponential_decay(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """The rate falls by half in four steps; what it reaches in sixty is a ten-thousandth."""
    data = waves(seed, 600, 20)
    model = LastOfRecurrent(nn.GRU(1, 24, batch_first=True), 24, 2)
    optimizer = Adam(model.parameters(), 5e-3)
    schedule = ExponentialLR(optimizer, 0.85) if faulty else None
    scheduled(recorder, clock, (model, optimizer, schedule), Batches(*data, 32, 400, seed))


@published_loop(
    "left_behind_integer_division",
    {"weight_not_updating"},
    "PyTorch's documentation of LambdaLR; the warm-up step // warmup is zero until it is one",
    "a warm-up over 200 steps by integer division",
)
def integer_division(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """The rate is zero for 200 steps and full at once."""
    data, _ = images(seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.05)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step // 200 if faulty else (step + 1) / 200))
    scheduled(recorder, clock, (model, optimizer, schedule), Batches(*data, 32, 250, seed))


@published(
    "left_behind_bfloat16_weights",
    {"weight_not_updating"},
    "Zamirai et al., Revisiting BFloat16 training (2020): updates are lost to nearest rounding",
    "weights are kept in bfloat16, SGD's rate is 1e-4",
)
def bfloat16_weights(seed: int, faulty: bool) -> Built:
    """A bfloat16 number has steps of 1/256; smaller updates are rounded away."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    model = dense([64, 64, 10])
    if faulty:
        model, x, unseen = model.bfloat16(), x.bfloat16(), unseen.bfloat16()
    optimizer = SGD(model.parameters(), 1e-4 if faulty else 0.1)
    return model, optimizer, functional.cross_entropy, Batches(x, y, 32, 250, seed, (unseen, labels))


class Encoded(nn.Module):
    """Token embeddings and a layer over them, classified; the encoder may be called without gradients."""

    def __init__(self, blind: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(BagOfTokens(60, 24, 24), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2))
        self.blind = blind

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.blind):
            held = self.encoder(x)
        return self.head(held)  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "left_behind_without_gradients",
    {"weight_not_updating"},
    "PyTorch's documentation of torch.no_grad; TrainCheck (OSDI 2025), kind: weights that silently never change",
    "the encoder, which is to learn, is called under no_grad",
)
def without_gradients(seed: int, faulty: bool) -> Built:
    """The head learns what random features allow."""
    data, unseen = tokens_with_keyword(seed, 600, 20, 60), tokens_with_keyword(seed + 50, 200, 20, 60)
    model = Encoded(faulty)
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )
