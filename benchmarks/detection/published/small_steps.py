"""Steps too small to get anywhere."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, RMSprop

from benchmarks.detection.data import Batches, copied_tokens, images, shipped, waves
from benchmarks.detection.models import LanguageModel, LastOfRecurrent, convolutional, dense
from benchmarks.detection.programs import Built, Clock, Recorder
from benchmarks.detection.published.pairs import published, published_loop


@published(
    "small_steps_gated_recurrent",
    {"slow_convergence"},
    "DeepFD (ICSE 2022), learning rate out of common range",
    "SGD at 1e-3 where an LSTM needs Adam at as much",
)
def gated_recurrent(seed: int, faulty: bool) -> Built:
    """Gradients through gates are small; the loss creeps."""
    data, unseen = waves(seed, 500, 20), waves(seed + 50, 200, 20)
    model = LastOfRecurrent(nn.LSTM(1, 24, batch_first=True), 24, 2)
    optimizer = SGD(model.parameters(), 1e-3) if faulty else Adam(model.parameters(), 1e-2)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "small_steps_adagrad",
    {"slow_convergence"},
    "Zeiler, ADADELTA (2012), on Adagrad's ever smaller steps; AUTOTRAINER (ICSE 2021), slow convergence",
    "Adagrad with a rate of 1e-4",
)
def adagrad(seed: int, faulty: bool) -> Built:
    """Its steps begin small and shrink."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 64, 10])
    optimizer = Adagrad(model.parameters(), 1e-4 if faulty else 1e-2)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "small_steps_transformer",
    {"slow_convergence"},
    "Humbatova et al. (ICSE 2020), suboptimal learning rate",
    "RMSprop with a rate of 1e-6 for a transformer",
)
def transformer(seed: int, faulty: bool) -> Built:
    """It would take a hundred thousand steps."""
    data, unseen = copied_tokens(seed, 600, 12, 12), copied_tokens(seed + 50, 100, 12, 12)
    model = LanguageModel(12, 12, layers=1, norm_first=True)
    optimizer = RMSprop(model.parameters(), 1e-6 if faulty else 1e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


@published_loop(
    "small_steps_clipped",
    {"slow_convergence"},
    "PyTorch's documentation of clip_grad_norm_; its max_norm bounds the norm over all parameters",
    "gradients are clipped to a norm of 0.001",
)
def clipped(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """Whatever the gradient, a step is a ten-thousandth."""
    data, _ = images(seed)
    model = convolutional()
    optimizer = SGD(model.parameters(), 0.1)
    recorder.watch(model, optimizer)
    for inputs, labels in Batches(*data, 32, 300, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.001 if faulty else 5.0)
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@published(
    "small_steps_averaged_twice",
    {"slow_convergence"},
    "PyTorch's documentation of CrossEntropyLoss, reduction: the mean is taken already",
    "the mean loss is divided by the size of the batch once more",
)
def averaged_twice(seed: int, faulty: bool) -> Built:
    """Gradients are a hundredth of what the rate was chosen for."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 32, 10])

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        mean = functional.cross_entropy(output, labels)
        return mean / len(labels) if faulty else mean

    return model, SGD(model.parameters(), 0.05), loss, Batches(*data, 128, 300, seed, unseen)


@published(
    "small_steps_scaled_twice",
    {"slow_convergence"},
    "TheDeepChecker (TOSEM 2022), unscaled inputs; ToTensor() scales by 255 already",
    "pixels are divided by 255 twice",
)
def scaled_twice(seed: int, faulty: bool) -> Built:
    """Inputs are below 0.004, and the first layer's gradients with them."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    if faulty:
        x, unseen = (x + 0.3) / 255, (unseen + 0.3) / 255
    model = dense([64, 64, 10])
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(x, y, 32, 300, seed, (unseen, labels)),
    )
