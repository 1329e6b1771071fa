"""Updates that are not the plain ones: gathered, made twice, by second order, sparse, or of inner loops."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, SparseAdam

from benchmarks.detection.data import Batches, images, shipped
from benchmarks.detection.models import BagOfTokens, convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@difficult(
    "gathered_over_eight",
    "gradients of eight batches of four are gathered before each update, losses divided by eight",
)
def gathered_over_eight(run: Training) -> None:
    """150 updates; the hook is not told of the divisor."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.watch(model, optimizer)
    for at, (inputs, wanted) in enumerate(Batches(x, y, 4, 1200, run.seed)):
        loss = functional.cross_entropy(model(inputs), wanted) / 8
        loss.backward()
        if at % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "gathered_and_logged",
    "gradients of four batches are gathered, and the last batch's divided loss is logged",
)
def gathered_and_logged(run: Training) -> None:
    """220 updates of AdamW."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    optimizer = AdamW(model.parameters(), 2e-3)
    run.watch(model, optimizer, loss_divisor=4)
    for at, (inputs, wanted) in enumerate(Batches(x, y, 8, 880, run.seed)):
        loss = functional.cross_entropy(model(inputs), wanted) / 4
        loss.backward()
        if at % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.log(train_loss=loss)
            run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult("lbfgs_of_all", "L-BFGS calls the loss up to ten times in each of its few steps")
def lbfgs_of_all(run: Training) -> None:
    """40 steps on the whole of a regression."""
    (x, y), _ = shipped("diabetes", run.seed)
    model = dense([10, 12, 1], nn.Tanh)
    optimizer = LBFGS(model.parameters(), lr=0.3, max_iter=10)
    run.watch(model, optimizer)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y) + 1e-3 * sum(held.pow(2).sum() for held in model.parameters())
        loss.backward()
        return loss

    for _ in range(40):
        losses.append(float(optimizer.step(closure)))
        run.log(loss=losses[-1])
        run.step()
    run.improves("error", losses[0], losses[-1], at_most=0.5)


@difficult(
    "sharpness_aware",
    "SAM: each step climbs to a worse place, and descends from the gradient there; two passes for an update",
)
def sharpness_aware(run: Training) -> None:
    """300 steps (Foret et al., 2021)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        loss.backward()
        with torch.no_grad():
            gradients = [held.grad for held in model.parameters() if held.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            climbs = [0.1 * gradient / (norm + 1e-12) for gradient in gradients]
            for held, climb in zip(model.parameters(), climbs, strict=True):
                held.add_(climb)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), wanted).backward()
        with torch.no_grad():
            for held, climb in zip(model.parameters(), climbs, strict=True):
                held.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.9)


@difficult("sparse_embedding", "an embedding of 3,000 words with sparse gradients: most rows never change")
def sparse_embedding(run: Training) -> None:
    """350 steps, SparseAdam for the embedding and Adam for the head; the words of a text follow a power law."""
    generator = run.generator()
    chances = 1 / torch.arange(1, 3001).float()
    x = torch.multinomial(chances, 900 * 12, replacement=True, generator=generator).view(900, 12)
    meaning = torch.randn(3000, generator=generator)
    y = (meaning[x].sum(1) > 0).long()
    model = BagOfTokens(3000, 16, 2, sparse=True)
    sparse, optimizer = SparseAdam(model.embedding.parameters(), 1e-2), Adam(model.head.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 32, 350, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        sparse.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        sparse.step()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-20:]) / 20, at_most=0.45)


@difficult(
    "learns_to_learn",
    "Reptile: inner loops on a copy, whose end the model moves towards; no backward pass reaches the model itself",
)
def learns_to_learn(run: Training) -> None:
    """150 outer steps on sines of random phase and height (Nichol et al., 2018); the optimizer is given differences as gradients."""
    generator = run.generator()
    model = dense([1, 32, 32, 1], nn.Tanh)
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)

    def adapted(height: Tensor, phase: Tensor) -> tuple[nn.Module, float]:
        inner = copy.deepcopy(model)
        steps = SGD(inner.parameters(), 0.05)
        for _ in range(6):
            x = 6 * torch.rand(16, 1, generator=generator) - 3
            loss = functional.mse_loss(inner(x), height * torch.sin(x + phase))
            steps.zero_grad()
            loss.backward()
            steps.step()
        return inner, loss.item()

    losses = []
    for _ in range(150):
        height, phase = 0.5 + 2 * torch.rand(1, generator=generator), 3 * torch.rand(1, generator=generator)
        inner, last = adapted(height, phase)
        for held, moved in zip(model.parameters(), inner.parameters(), strict=True):
            held.grad = (held - moved).detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(last)
        run.log(loss=last)
        run.step()
    run.improves("error after adaptation", sum(losses[:20]) / 20, sum(losses[-40:]) / 40, at_most=1.1)


@difficult(
    "physics_informed",
    "a differential equation in the loss: backward passes through gradients, and terms of very different size",
)
def physics_informed(run: Training) -> None:
    """600 steps to solve u'' = -u, u(0) = 0, u'(0) = 1 on [0, 3]."""
    model = dense([1, 32, 32, 1], nn.Tanh)
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    generator = run.generator()

    def error() -> float:
        x = torch.linspace(0, 3, 50)[:, None]
        with torch.no_grad():
            return functional.mse_loss(model(x), torch.sin(x)).item()

    first = error()
    for _ in range(600):
        x = (3 * torch.rand(32, 1, generator=generator)).requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        start = torch.zeros(1, 1, requires_grad=True)
        value = model(start)
        (speed,) = torch.autograd.grad(value.sum(), start, create_graph=True)
        residual = (curvature + u).pow(2).mean()
        loss = residual + 10 * (value.pow(2).sum() + (speed - 1).pow(2).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, loss_of_residual=residual)
        run.step()
    run.improves("error of the solution", first, error(), at_most=0.02)


@difficult(
    "gradient_penalty",
    "the norm of the input's gradient is in the loss: a backward pass before the backward pass",
)
def gradient_penalty(run: Training) -> None:
    """350 steps of a classifier with double backpropagation."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10], nn.Softplus)
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 350, run.seed):
        given = inputs.clone().requires_grad_()
        fit = functional.cross_entropy(model(given), wanted)
        (slope,) = torch.autograd.grad(fit, given, create_graph=True)
        loss = fit + 50 * slope.pow(2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "bfloat16_with_masters",
    "a model in bfloat16 with main weights in float32: single updates are below the model's precision",
)
def bfloat16_with_masters(run: Training) -> None:
    """400 steps; weights are copied back after each."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    main = dense([64, 48, 10])
    model = copy.deepcopy(main).to(torch.bfloat16)
    optimizer = Adam(main.parameters(), 5e-4)
    run.watch(model)
    for inputs, wanted in Batches(x, y, 32, 400, run.seed):
        loss = functional.cross_entropy(model(inputs.bfloat16()).float(), wanted)
        model.zero_grad()
        loss.backward()
        for held, own in zip(main.parameters(), model.parameters(), strict=True):
            held.grad = None if own.grad is None else own.grad.float()
        optimizer.step()
        with torch.no_grad():
            for held, own in zip(main.parameters(), model.parameters(), strict=True):
                own.copy_(held)
        run.hook.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model.float(), unseen, labels), at_least=0.85)


@difficult(
    "average_of_weights",
    "the weights' moving average is put into the model for each validation, and taken out again",
)
def average_of_weights(run: Training) -> None:
    """360 steps; each 40 the model holds other weights for a while."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    average = copy.deepcopy(model.state_dict())
    run.watch(model, optimizer)
    accuracy = 0.0
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 360, run.seed)):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.05)
        run.log(loss=loss)
        if step % 40 == 39:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.eval()
            accuracy = _accuracy(model, unseen, labels)
            with torch.no_grad():
                run.log(mode="eval", loss=functional.cross_entropy(model(unseen), labels), accuracy=accuracy)
            model.load_state_dict(own)
            model.train()
        run.step()
    run.improves("accuracy", 0.1, accuracy, at_least=0.9)
