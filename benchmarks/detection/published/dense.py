"""Faults in fully connected networks: initialisation, activations, scales."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, RMSprop

from benchmarks.detection.data import Batches, blobs, linear_targets, rings, shipped
from benchmarks.detection.models import dense, normal
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


@published(
    "dense_tiny_normal_weights",
    {"vanishing_gradient", "poor_initialization"},
    "TheDeepChecker (TOSEM 2022), wrong initialisation; Glorot and Bengio (AISTATS 2010)",
    "eleven tanh layers with weights from N(0, 0.02²)",
)
def tiny_normal_weights(seed: int, faulty: bool) -> Built:
    """Signals and gradients shrink by a constant factor at each layer."""
    data, unseen = shipped("digits", seed)
    fill = normal(0.02) if faulty else nn.init.xavier_normal_
    model = dense([64] + [48] * 10 + [10], nn.Tanh, fill=fill)
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "dense_uniform_positive_weights",
    {"poor_initialization"},
    "Humbatova et al. (ICSE 2020), taxonomy of real faults: wrong weights initialisation",
    "weights from torch.rand, which are all positive",
)
def uniform_positive_weights(seed: int, faulty: bool) -> Built:
    """Activations grow by half a layer's width at each layer; logits begin in the ten thousands."""
    data, unseen = shipped("wine", seed)
    fill = nn.init.uniform_ if faulty else nn.init.kaiming_uniform_
    model = dense([13, 64, 64, 64, 3], fill=fill)
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "dense_zero_weights",
    {"poor_initialization", "weight_not_updating"},
    "TheDeepChecker (TOSEM 2022), null weights: symmetry is not broken",
    "all weights and biases begin at zero",
)
def zero_weights(seed: int, faulty: bool) -> Built:
    """Only the last bias has a gradient."""
    data, unseen = shipped("digits", seed)
    fill = nn.init.zeros_ if faulty else nn.init.kaiming_normal_
    model = dense([64, 48, 48, 10], fill=fill)
    return (
        model,
        SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "dense_wide_normal_relu",
    {"exploding_gradient", "poor_initialization"},
    "AUTOTRAINER (ICSE 2021), exploding gradient on Blob; He et al. (ICCV 2015)",
    "eight ReLU layers of 64 with weights from N(0, 1)",
)
def wide_normal_relu(seed: int, faulty: bool) -> Built:
    """Gradients grow by a factor of about six at each layer."""
    data, unseen = blobs(seed, 600), blobs(seed, 600)
    fill = normal(1.0) if faulty else nn.init.kaiming_normal_
    model = dense([8] + [64] * 7 + [4], fill=fill)
    rate = 0.01
    return (
        model,
        SGD(model.parameters(), rate),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "dense_sigmoid_large_weights",
    {"saturated_activation"},
    "DeepDiagnosis (ICSE 2022), saturated activation; CS231n notes, sigmoid saturates",
    "sigmoid layers with weights from N(0, 4²) on pixels from 0 to 16",
)
def sigmoid_large_weights(seed: int, faulty: bool) -> Built:
    """Hidden units answer 0 or 1 and hardly ever anything between."""
    data, unseen = shipped("digits", seed, scaled=not faulty)
    model = dense([64, 64, 32, 10], nn.Sigmoid, fill=normal(4.0) if faulty else nn.init.xavier_normal_)
    optimizer = SGD(model.parameters(), 0.05 if faulty else 1.0)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


@published(
    "dense_tanh_unscaled_inputs",
    {"saturated_activation", "loss_not_decreasing"},
    "TheDeepChecker (TOSEM 2022), unscaled inputs; UMLAUT (CHI 2021), input exceeds typical limits",
    "wine's raw columns, up to 1,680, into tanh",
)
def tanh_unscaled_inputs(seed: int, faulty: bool) -> Built:
    """The largest column alone decides the sign of every hidden unit."""
    data, unseen = shipped("wine", seed, scaled=not faulty)
    model = dense([13, 32, 32, 3], nn.Tanh)
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "dense_dying_at_birth",
    {"dead_relu", "loss_not_decreasing"},
    "Lu et al., Dying ReLU and initialization (2019); AUTOTRAINER (ICSE 2021), dying ReLU on Circle",
    "sixteen ReLU layers that are three wide, with biases below zero",
)
def dying_at_birth(seed: int, faulty: bool) -> Built:
    """A narrow deep network gives the same answer to everything from its first step."""
    data, unseen = rings(seed, 600), rings(seed + 50, 300)
    model = (
        dense([2] + [3] * 16 + [1], fill=nn.init.kaiming_normal_) if faulty else dense([2, 24, 24, 1], nn.ELU)
    )
    if faulty:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.bias, -0.1)
    optimizer = Adam(model.parameters(), 0.01 if faulty else 0.003)
    loss = functional.binary_cross_entropy_with_logits
    return model, optimizer, loss, Batches(*data, 32, 250, seed, unseen)


@published(
    "dense_raw_pixels_rmsprop",
    {"dead_relu"},
    "UMLAUT (CHI 2021), input exceeds typical limits; CS231n notes, ReLU units die at high rates",
    "pixels from 0 to 255 into ReLU, RMSprop with a rate of 0.05",
)
def raw_pixels_rmsprop(seed: int, faulty: bool) -> Built:
    """The first updates push most hidden units below zero for all images, for good."""
    (x, y), (unseen, labels) = shipped("digits", seed, scaled=not faulty)
    if faulty:
        x, unseen = x * (255 / 16), unseen * (255 / 16)
    model = dense([64, 64, 32, 10])
    optimizer = RMSprop(model.parameters(), 0.05 if faulty else 1e-3)
    return model, optimizer, functional.cross_entropy, Batches(x, y, 32, 250, seed, (unseen, labels))


@published(
    "dense_regression_nan",
    {"exploding_gradient", "nan_or_inf"},
    "Stack Overflow 37232782, NaN loss when training a regression network",
    "targets in the hundreds, many inputs, SGD with a rate that is far too high",
)
def regression_nan(seed: int, faulty: bool) -> Built:
    """The squared error grows from step to step until nothing is finite."""
    x, y = linear_targets(seed, 400, 30)
    if not faulty:
        y = (y - y.mean()) / y.std()
    model = dense([30, 64, 1])
    return model, SGD(model.parameters(), 0.05), functional.mse_loss, Batches(x, y, 32, 200, seed)


@published(
    "dense_softmax_before_cross_entropy",
    {"slow_convergence"},
    "Karpathy, common neural net mistakes (2018): softmaxed outputs to a loss that expects raw logits",
    "softmax as the last layer, and cross-entropy's own after it",
)
def softmax_before_cross_entropy(seed: int, faulty: bool) -> Built:
    """The loss cannot fall below 1.46, and gradients are a tenth of what they should be."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 48, 10], last=nn.Softmax(1) if faulty else None)
    return (
        model,
        SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        Batches(*data, 32, 300, seed, unseen),
    )


@published(
    "dense_tiny_features",
    {"slow_convergence"},
    "TheDeepChecker (TOSEM 2022), unscaled inputs; Humbatova et al. (ICSE 2020), missing preprocessing",
    "diabetes' columns as shipped, with a deviation of 0.05, under a rate for scaled ones",
)
def tiny_features(seed: int, faulty: bool) -> Built:
    """Gradients by the inputs are a twentieth, and so is their effect on the output: 1/400 of the speed."""
    (x, y), (unseen, labels) = shipped("diabetes", seed)
    if faulty:
        x, unseen = x * 0.0476, unseen * 0.0476
    model = nn.Linear(10, 1)
    return (
        model,
        SGD(model.parameters(), 0.02),
        functional.mse_loss,
        Batches(x, y, 32, 300, seed, (unseen, labels)),
    )


@published(
    "dense_broadcast_residuals",
    {"loss_not_decreasing"},
    "PyTorch's warning of F.mse_loss, 'Using a target size that is different to the input size'",
    "(n, 1) outputs less (n,) targets: n by n differences",
)
def broadcast_residuals(seed: int, faulty: bool) -> Built:
    """The best answer to every input is the mean of the targets."""
    (x, y), (unseen, labels) = shipped("diabetes", seed)
    if faulty:
        y, labels = y.view(-1), labels.view(-1)
    model = dense([10, 32, 1])

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).pow(2).mean()

    return model, Adam(model.parameters(), 3e-3), loss, Batches(x, y, 32, 300, seed, (unseen, labels))


@published(
    "dense_weight_decay_far_too_strong",
    {"loss_not_decreasing"},
    "Humbatova et al. (ICSE 2020), taxonomy of real faults: regularisation at fault",
    "weight decay of 0.5",
)
def weight_decay_far_too_strong(seed: int, faulty: bool) -> Built:
    """Weights decay to nothing within some dozen steps, and the loss stays at that of a guess."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 48, 48, 10], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.1, weight_decay=0.5 if faulty else 5e-4)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)
