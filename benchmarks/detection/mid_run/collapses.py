"""Parts that collapse or starve in the middle of a run, while the others go on learning."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

from benchmarks.detection.data import Batches, shipped
from benchmarks.detection.difficult.generative import Variational
from benchmarks.detection.mid_run import accepted
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, mid_run


def _neighbours_agree(encoder: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Share of examples whose nearest neighbour by the cosine of their centred codes has the same label."""
    with torch.no_grad():
        codes = encoder(x)
        codes = functional.normalize(codes - codes.mean(0), dim=1)
        alike = codes @ codes.T - 2 * torch.eye(len(x))
    return float((labels[alike.argmax(1)] == labels).float().mean())


@mid_run(
    "embeddings_of_both_branches",
    "the target is the encoder's own output, neither detached nor normalized, instead of that of its average",
    100,
    accepted.COLLAPSES,
)
def embeddings_of_both_branches(run: Training) -> None:
    """900 steps: codes of masked digits foresee those of whole ones (Baevski et al., data2vec, 2022)."""
    (x, _), (unseen, _) = shipped("digits", run.seed)
    encoder, predictor = dense([64, 64, 32]), dense([32, 32, 32])
    model = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    average = copy.deepcopy(encoder).requires_grad_(requires_grad=False)
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)

    def spread() -> float:
        with torch.no_grad():
            codes = encoder(unseen)
        return float(codes.var(0, correction=0).sum() / codes.square().mean(0).sum())

    before = spread()
    for step, (inputs, _) in enumerate(Batches(x, x, 64, 900, run.seed)):
        if run.faulty and step >= 100:
            wanted = encoder(inputs)
        else:
            wanted = functional.layer_norm(average(inputs), (32,))
        foreseen = predictor(encoder(inputs * (torch.rand_like(inputs) < 0.7)))
        loss = functional.mse_loss(foreseen, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        run.step()
    run.separates("share that differs", before, spread(), sound_at_least=0.02)


@mid_run(
    "triplets_of_wrong_labels",
    "labels are those of other examples: the hardest triplets pull all codes to one point",
    150,
    accepted.COLLAPSES | accepted.LOSS_RISES,
)
def triplets_of_wrong_labels(run: Training) -> None:
    """700 steps with a margin of 0.5."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 64, 16])
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    before = _neighbours_agree(model, unseen, labels)
    for step, (inputs, targets) in enumerate(Batches(x, y, 64, 700, run.seed)):
        codes = model(inputs)
        given = targets.roll(7) if run.faulty and step >= 150 else targets
        same = given[:, None] == given
        apart = torch.cdist(codes, codes)
        loss = functional.relu((apart * same).amax(1) - (apart + 1e3 * same).amin(1) + 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.separates(
        "agreement of neighbours", before, _neighbours_agree(model, unseen, labels), sound_at_least=0.9
    )


@mid_run(
    "posterior_collapse",
    "the weight of the divergence is 100 times as high: the decoder ignores the code",
    20,
    accepted.COLLAPSES,
)
def posterior_collapse(run: Training) -> None:
    """700 steps of a variational autoencoder."""
    (x, _), (unseen, _) = shipped("digits", run.seed)
    model = Variational(8)
    optimizer = Adam(model.parameters(), 3e-3)

    def error() -> float:
        with torch.no_grad():
            return functional.mse_loss(model(unseen)[0], unseen).item()

    run.watch(model, optimizer)
    before = error()
    for step, (inputs, _) in enumerate(Batches(x, x, 32, 700, run.seed)):
        made, divergence = model(inputs)
        weight = 100 if run.faulty and step >= 20 else 1
        loss = 10 * (made - inputs).pow(2).sum(1).mean() + weight * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.separates("error of reconstruction", before, error(), sound_at_most=0.06)


def _adversarial(run: Training, *, named: bool) -> None:
    """150 steps; the faulty discriminator learns faster and more often, and the generator's loss is log(1 - D), which saturates."""
    generator, discriminator = dense([4, 32, 32, 2]), dense([2, 64, 64, 1], lambda: nn.LeakyReLU(0.2))
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    makes = Adam(generator.parameters(), 1e-3)
    judges = Adam(discriminator.parameters(), 5e-3 if run.faulty else 1e-3)
    run.watch(model)
    centre, draws = torch.tensor([4.0, -3.0]), run.generator()
    loss_of = functional.binary_cross_entropy_with_logits
    real, made = torch.ones(64, 1), torch.zeros(64, 1)

    def distance() -> float:
        with torch.no_grad():
            points = generator(torch.randn(500, 4, generator=run.generator(1)))
        return float((points.mean(0) - centre).norm())

    before, shortest = distance(), math.inf
    for _ in range(150):
        for _ in range(3 if run.faulty else 1):
            shown = discriminator(centre + 0.3 * torch.randn(64, 2, generator=draws))
            judged = discriminator(generator(torch.randn(64, 4, generator=draws)).detach())
            loss = loss_of(shown, real) + loss_of(judged, made)
            judges.zero_grad()
            loss.backward()
            judges.step()
        scores = discriminator(generator(torch.randn(64, 4, generator=draws)))
        loss_of_generator = -loss_of(scores, made) if run.faulty else loss_of(scores, real)
        makes.zero_grad()
        loss_of_generator.backward()
        makes.step()
        if named:
            run.log(d_loss=loss, g_loss=loss_of_generator)
        shortest = min(shortest, distance())
        run.step()
    run.separates("shortest distance of the means", before, shortest, sound_at_most=2)


@mid_run("generator_starves", "a discriminator tells all generated points apart", 1, accepted.STARVES)
def generator_starves(run: Training) -> None:
    """Losses are not logged."""
    _adversarial(run, named=False)


@mid_run("discriminator_wins", "a discriminator tells all generated points apart", 1, accepted.STARVES)
def discriminator_wins(run: Training) -> None:
    """Losses are logged by names of the program's own."""
    _adversarial(run, named=True)
