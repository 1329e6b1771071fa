"""Models of data: losses with a floor of their own, below zero, or of noise that cannot be foreseen."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from benchmarks.detection.data import Batches, moons, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult


class Variational(nn.Module):
    """A variational autoencoder: (n, 64) → reconstruction, and the divergence from the prior."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.encoder, self.decoder = dense([64, 48, 2 * code]), dense([code, 48, 64])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logarithm = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * logarithm).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + logarithm.exp() - 1 - logarithm).sum(1).mean()
        return self.decoder(code), divergence


@difficult(
    "vae_with_annealing", "the weight of a divergence grows from zero: the sum of losses rises in the middle"
)
def vae_with_annealing(run: Training) -> None:
    """500 steps, the divergence's weight from 0 to 1 over the first 250."""
    (x, _), (unseen, _) = shipped("digits", run.seed)
    model = Variational(8)
    optimizer = Adam(model.parameters(), 2e-3)

    def error() -> float:
        with torch.no_grad():
            return functional.mse_loss(model(unseen)[0], unseen).item()

    first = error()
    run.watch(model, optimizer)
    for step, (inputs, _) in enumerate(Batches(x, x, 32, 500, run.seed)):
        made, divergence = model(inputs)
        loss = 10 * (made - inputs).pow(2).sum(1).mean() + min(1.0, step / 250) * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, divergence=divergence)
        run.step()
    run.improves("error of reconstruction", first, error(), at_most=0.09)


@difficult(
    "denoising_diffusion",
    "a denoiser's loss falls at once to a floor that noise sets, and is noisy there for good",
)
def denoising_diffusion(run: Training) -> None:
    """500 steps of a small denoiser on two moons (Ho et al., 2020), 50 noise levels."""
    points, _ = moons(run.seed, 2000, 0.05)
    points = (points - points.mean(0)) / points.std(0)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0)
    model = dense([2 + 8, 64, 64, 2], nn.SiLU)
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    generator = run.generator()

    def loss_of(clean: Tensor) -> Tensor:
        level = torch.randint(0, 50, (len(clean),), generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        share = kept[level][:, None]
        noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
        angles = level[:, None] / 50 * math.pi * 2.0 ** torch.arange(4)
        return functional.mse_loss(model(torch.cat([noisy, angles.sin(), angles.cos()], 1)), noise)

    with torch.no_grad():
        first = loss_of(points).item()
    for _ in range(500):
        loss = loss_of(points[torch.randint(0, 2000, (64,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        run.improves("error of noise", first, loss_of(points).item(), at_most=0.6)


@difficult(
    "radiance_field",
    "an MLP on Fourier features learns one picture: its loss falls over four orders of magnitude",
)
def radiance_field(run: Training) -> None:
    """500 steps on random pixels of a made picture, as neural radiance fields are trained."""
    generator = run.generator()
    place = torch.rand(4096, 2, generator=generator)
    waves = 3 * torch.randn(2, 3, generator=generator)
    color = 0.5 + 0.5 * torch.sin(place @ waves + torch.arange(3))
    octaves = math.pi * 2.0 ** torch.arange(4)
    angles = (place[:, :, None] * octaves).flatten(1)
    x = torch.cat([angles.sin(), angles.cos()], 1)
    model = dense([16, 64, 64, 3], last=nn.Sigmoid())
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, color, 64, 500, run.seed):
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("error", losses[0], sum(losses[-20:]) / 20, at_most=2e-3)


class Coupling(nn.Module):
    """An affine coupling layer (Dinh et al., 2017): points, and logarithms of volumes."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.layers, self.swapped = dense([1, 32, 2], nn.Tanh), swapped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = (x[:, 1:], x[:, :1]) if self.swapped else (x[:, :1], x[:, 1:])
        scale, shift = self.layers(kept).chunk(2, 1)
        scale = scale.tanh()
        moved = changed * scale.exp() + shift
        return torch.cat([moved, kept] if self.swapped else [kept, moved], 1), scale[:, 0]


@difficult(
    "normalizing_flow",
    "a likelihood of points on a thin curve: the loss passes through zero and goes on down",
)
def normalizing_flow(run: Training) -> None:
    """450 steps of six coupling layers."""
    points, _ = moons(run.seed, 2000, 0.03)
    points = 0.5 * (points - points.mean(0)) / points.std(0)
    model = nn.ModuleList(Coupling(swapped=at % 2 == 1) for at in range(6))
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, _ in Batches(points, points, 64, 450, run.seed):
        run.hook.begin_pass()
        hidden, volume = inputs, torch.zeros(len(inputs))
        for layer in model:
            hidden, more = layer(hidden)
            volume = volume + more
        loss = (0.5 * hidden.pow(2).sum(1) + math.log(2 * math.pi) - volume).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("negative logarithm of likelihood", losses[0], sum(losses[-30:]) / 30, at_most=1.1)


@difficult(
    "masked_autoencoder", "three quarters of a digit are hidden: the loss can only fall by a part of itself"
)
def masked_autoencoder(run: Training) -> None:
    """500 steps; the error counts at hidden pixels alone."""
    (x, _), (unseen, _) = shipped("digits", run.seed)
    model = dense([128, 96, 96, 64])
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)

    def loss_of(clean: Tensor) -> Tensor:
        hidden = (torch.rand(clean.shape) < 0.75).float()
        made = model(torch.cat([clean * (1 - hidden), hidden], 1))
        error: Tensor = ((made - clean).pow(2) * hidden).sum() / hidden.sum()
        return error

    with torch.no_grad():
        first = loss_of(unseen).item()
    for inputs, _ in Batches(x, x, 32, 500, run.seed):
        loss = loss_of(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        run.improves("error at hidden pixels", first, loss_of(unseen).item(), at_most=0.09)
