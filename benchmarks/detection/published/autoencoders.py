"""Faults in autoencoders, on digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


@published(
    "autoencoder_deep_sigmoid",
    {"vanishing_gradient", "loss_not_decreasing"},
    "Hinton and Salakhutdinov (Science 2006): deep autoencoders of sigmoids do not train from random weights",
    "nine sigmoid layers, SGD",
)
def deep_sigmoid(seed: int, faulty: bool) -> Built:
    """The mean image is learnt, and nothing else."""
    (x, _), (unseen, _) = shipped("digits", seed)
    sizes = [64, 128, 64, 32, 16, 8, 16, 32, 64, 128, 64] if faulty else [64, 48, 16, 48, 64]
    model = dense(sizes, nn.Sigmoid if faulty else nn.Tanh)
    optimizer = SGD(model.parameters(), 0.1) if faulty else Adam(model.parameters(), 3e-3)
    return model, optimizer, functional.mse_loss, Batches(x, x, 32, 250, seed, (unseen, unseen))


@published(
    "autoencoder_bounded_output",
    {"saturated_activation"},
    "Humbatova et al. (ICSE 2020), wrong type of activation; sigmoid outputs for targets beyond 1",
    "sigmoid as the last layer, pixels from 0 to 16 as targets",
)
def bounded_output(seed: int, faulty: bool) -> Built:
    """Outputs go to their bound and stay there."""
    (x, _), (unseen, _) = shipped("digits", seed, scaled=False)
    if not faulty:
        x, unseen = x / 16, unseen / 16
    model = dense([64, 32, 64], nn.ELU, last=nn.Sigmoid())
    return (
        model,
        Adam(model.parameters(), 1e-2 if faulty else 2e-3),
        functional.mse_loss,
        Batches(x, x, 32, 250, seed, (unseen, unseen)),
    )


class Variational(nn.Module):
    """A variational autoencoder whose loss takes mean, logarithm of the variance and reconstruction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = dense([64, 48, 2 * width]), dense([width, 48, 64])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logarithm = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
        return self.decoder(drawn), mean, logarithm


@published(
    "autoencoder_variance_overflows",
    {"nan_or_inf", "exploding_gradient"},
    "PyTorch's forum, many times: exp(log-variance) of a variational autoencoder overflows",
    "pixels from 0 to 255, summed losses, SGD with a rate of 1e-3",
)
def variance_overflows(seed: int, faulty: bool) -> Built:
    """One large update of the encoder makes the exponent overflow."""
    (x, _), (unseen, _) = shipped("digits", seed, scaled=False)
    x, unseen = (x * (255 / 16), unseen * (255 / 16)) if faulty else (x / 16, unseen / 16)

    def loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        image, mean, logarithm = outputs
        divergence = -0.5 * (1 + logarithm - mean.pow(2) - logarithm.exp()).sum(1).mean()
        return (image - targets).pow(2).sum(1).mean() + 0.1 * divergence

    model = Variational(8)
    optimizer = SGD(model.parameters(), 1e-3) if faulty else Adam(model.parameters(), 1e-3)
    return model, optimizer, loss, Batches(x, x, 32, 200, seed, (unseen, unseen))
