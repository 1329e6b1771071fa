"""Tasks in which a loss, a gradient or an output does what it does in few others: critics, flows, phases, constraints."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.detection.data import Pair, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult


def drawn(data: Pair, size: int, order: torch.Generator) -> Pair:
    """Examples, drawn with replacement."""
    chosen = torch.randint(len(data[0]), (size,), generator=order)
    return data[0][chosen], data[1][chosen]


@torch.no_grad()
def accuracy(model: Any, data: Pair) -> float:
    """The share of right answers, in evaluation mode."""
    was_training = model.training
    model.eval()
    share = (model(data[0]).argmax(1) == data[1]).float().mean()
    model.train(was_training)
    return float(share)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@difficult("actor_with_a_value_loss", "the value's error is named value_loss, and rises as returns grow")
def actor_and_critic(run: Training) -> None:
    order = run.generator()
    body, policy, value = nn.Sequential(nn.Linear(8, 48), nn.Tanh()), nn.Linear(48, 4), nn.Linear(48, 1)
    model = nn.ModuleDict({"body": body, "policy": policy, "value": value})
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    preference = torch.randn(8, 4, generator=order)
    run.watch(model, optimizer)
    rewards = []
    for _ in range(500):
        state = torch.randn(64, 8, generator=order)
        hidden = body(state)
        choice = torch.distributions.Categorical(logits=policy(hidden))
        action = choice.sample()
        reward = ((state @ preference).argmax(1) == action).float() + 0.3 * torch.randn(64, generator=order)
        estimate = value(hidden)[:, 0]
        value_loss = functional.mse_loss(estimate, reward)
        gain = (choice.log_prob(action) * (reward - estimate).detach()).mean()
        loss = 0.5 * value_loss - gain - 0.01 * choice.entropy().mean()
        update(optimizer, loss)
        rewards.append(float(reward.mean()))
        run.log(loss=loss, value_loss=value_loss, entropy=choice.entropy().mean())
        run.step()
    run.improves("mean reward", sum(rewards[:5]) / 5, sum(rewards[-20:]) / 20, at_least=0.8)


class Coupling(nn.Module):
    """Scales and moves one of two coordinates by a function of the other that begins as the identity."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.net = first, dense([1, 32, 2])
        nn.init.zeros_(self.net[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.net[2].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given, changed = (x[:, :1], x[:, 1:]) if self.first else (x[:, 1:], x[:, :1])
        scale, shift = self.net(given).chunk(2, 1)
        scale = 2 * scale.tanh()
        changed = changed * scale.exp() + shift
        return torch.cat([given, changed] if self.first else [changed, given], 1), scale[:, 0]


@difficult("flow_that_begins_as_identity", "all layers with two inputs begin at zero")
def flow(run: Training) -> None:
    order = run.generator()
    model = nn.ModuleList(Coupling(place % 2 == 0) for place in range(6))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)

    def surprise(count: int) -> Tensor:
        first = torch.randn(count, 1, generator=order)
        x = torch.cat([first, 0.5 * first**2 + 0.05 * torch.randn(count, 1, generator=order)], 1)
        volume = torch.zeros(count)
        for layer in model:
            x, scale = layer(x)
            volume = volume + scale
        return (0.5 * (x**2).sum(1) + math.log(2 * math.pi) - volume).mean()

    with torch.no_grad():
        before = float(surprise(2000))
    for _ in range(500):
        loss = surprise(128)
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        run.improves("negative log-likelihood", before, float(surprise(2000)), at_most=0.3)


class OneStep(nn.Module):
    """A recurrent cell that is used once, from an empty state."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.cell, self.head = nn.Linear(64, 32), nn.GRUCell(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(functional.relu(self.given(x))))  # type: ignore[no-any-return]  # a module's call is untyped


@difficult("memory_cell_used_once", "the weight of the state never gets a gradient, for the state is empty")
def one_step(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    model = OneStep()
    classify(run, model, torch.optim.Adam(model.parameters(), lr=3e-3), data, unseen, at_least=0.93)


def classify(
    run: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Pair,
    unseen: Pair,
    *,
    at_least: float,
) -> None:
    """Three hundred steps of the plain loop."""
    order = run.generator()
    run.watch(model, optimizer)
    before = accuracy(model, unseen)
    for _ in range(300):
        x, y = drawn(data, 64, order)
        loss = functional.cross_entropy(model(x), y)
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", before, accuracy(model, unseen), at_least=at_least)


@difficult("classes_learned_in_three_parts", "validation has classes that training comes to later")
def classes_in_parts(run: Training) -> None:
    (x, y), unseen = shipped("digits", run.seed)
    model, order = dense([64, 96, 10]), run.generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parts = [
        torch.isin(y, torch.tensor(part)).nonzero()[:, 0] for part in ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    ]
    run.watch(model, optimizer)
    before = accuracy(model, unseen)
    for step in range(450):
        phase = step // 150
        chosen = drawn((parts[phase], parts[phase]), 32, order)[0]
        if phase:
            earlier = torch.cat(parts[:phase])
            chosen = torch.cat([chosen, drawn((earlier, earlier), 32, order)[0]])
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        update(optimizer, loss)
        run.log(loss=loss)
        run.record(labels=y[chosen])
        if step % 20 == 0:
            with torch.no_grad():
                unseen_loss = functional.cross_entropy(model(unseen[0]), unseen[1])
            run.log(mode="eval", loss=unseen_loss, accuracy=accuracy(model, unseen))
        run.step()
    run.improves("accuracy of all classes", before, accuracy(model, unseen), at_least=0.88)


class Bounded(nn.Module):
    """A model, and by how much each output exceeds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.excess = dense([5, 48, 4], nn.Tanh), nn.ReLU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.net(x)
        return output, self.excess(output - 1.0)


@difficult("penalty_of_a_bound_that_is_kept", "a rectifier that is zero for all examples, as it should be")
def penalty(run: Training) -> None:
    order = run.generator()
    model, mixing = Bounded(), torch.randn(5, 4, generator=order)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)

    def error(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=order)
        output, excess = model(x)
        return functional.mse_loss(output, 0.9 * torch.tanh(x @ mixing)), excess.mean()

    with torch.no_grad():
        before = float(error(500)[0])
    for _ in range(400):
        wrong, excess = error(64)
        loss = wrong + 10 * excess
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        run.improves("squared error", before, float(error(500)[0]), at_most=0.05)


def sequences(sharpness: float, seed: int, order: torch.Generator) -> Tensor:
    """400 sequences of 21 tokens of 16, each drawn by the one before."""
    table = sharpness * torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
    tokens = [torch.randint(16, (400,), generator=order)]
    for _ in range(20):
        tokens.append(torch.multinomial(table.softmax(1)[tokens[-1]], 1, generator=order)[:, 0])
    return torch.stack(tokens, 1)


@difficult("corpora_in_turns", "one corpus has a higher entropy, so the loss goes up and down with each step")
def corpora(run: Training) -> None:
    order = run.generator()
    texts = [sequences(0.8, 1, order), sequences(2.5, 2, order)]
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)

    def surprise(tokens: Tensor, corpus: int) -> Tensor:
        logits = model(tokens[:, :-1] + 16 * corpus)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def both() -> float:
        with torch.no_grad():
            return sum(float(surprise(text[:100], corpus)) for corpus, text in enumerate(texts))

    before = both()
    for step in range(500):
        corpus = step % 2
        chosen = 100 + torch.randint(300, (16,), generator=order)
        loss = surprise(texts[corpus][chosen], corpus)
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    run.improves("loss of both", before, both(), at_most=4.4)


@difficult("classifier_joins_the_autoencoder", "the loss gets a second, larger term in the middle")
def second_term(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    order = run.generator()
    encoder, decoder, head = dense([64, 48, 16]), dense([16, 48, 64]), nn.Linear(16, 10)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    classifier = nn.Sequential(encoder, head)
    before = accuracy(classifier, unseen)
    for step in range(450):
        x, y = drawn(data, 64, order)
        code = encoder(x)
        loss = rebuilt = functional.mse_loss(decoder(code), x)
        if step >= 200:
            loss = loss + functional.cross_entropy(head(code), y)
        update(optimizer, loss)
        run.log(loss=loss, reconstruction_loss=rebuilt)
        run.step()
    run.improves("accuracy", before, accuracy(classifier, unseen), at_least=0.9)


@difficult("reward_met_late", "the loss is next to nothing until the agent meets its first reward")
def late_reward(run: Training) -> None:
    order = run.generator()
    places = 14
    states, model = torch.eye(places), dense([places, 48, 2])
    target = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    met: list[tuple[int, int, float, int]] = []

    def goes(place: int, action: int) -> int:
        return min(place + 1, places - 1) if action else max(0, place - 1)

    place = 0
    for step in range(600):
        for _ in range(6):
            explores = float(torch.rand(1, generator=order)) < max(0.1, 1 - step / 300)
            action = int(
                torch.randint(2, (1,), generator=order) if explores else model(states[place]).argmax()
            )
            reward = float(goes(place, action) == places - 1)
            met.append((place, action, reward, goes(place, action)))
            place = 0 if reward else goes(place, action)
        met = met[-4000:]
        chosen = [met[at] for at in torch.randint(len(met), (64,), generator=order).tolist()]
        at, actions, rewards, after = (torch.tensor(column) for column in zip(*chosen, strict=True))
        with torch.no_grad():
            aim = rewards + 0.95 * (1 - rewards) * target(states[after]).max(1)[0]
        loss = functional.mse_loss(model(states[at]).gather(1, actions[:, None])[:, 0], aim)
        update(optimizer, loss)
        run.log(loss=loss)
        if step % 20 == 0:
            target.load_state_dict(model.state_dict())
        run.step()
    place = count = 0
    while place < places - 1 and count < 60:
        place, count = goes(place, int(model(states[place]).argmax())), count + 1
    run.improves("steps to the goal", None, count, at_most=places - 1)


@difficult(
    "larger_rate_for_a_second_task", "the learning rate becomes ten times as large as harder data begin"
)
def second_task(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    model, order = dense([64, 64, 10]), run.generator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    easy = data[0][data[1] < 2], data[1][data[1] < 2]
    run.watch(model, optimizer)
    before = accuracy(model, unseen)
    for step in range(450):
        if step == 150:
            optimizer.param_groups[0]["lr"] = 0.1
        x, y = drawn(easy if step < 150 else data, 32, order)
        loss = functional.cross_entropy(model(x), y)
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", before, accuracy(model, unseen), at_least=0.93)


class Hashing(nn.Module):
    """Classes from codes that are near to -1 or 1 the more the slope grows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.code, self.head = dense([64, 96, 24]), nn.Tanh(), nn.Linear(24, 10)
        self.slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        signal = self.net(x)
        code = self.code(self.slope * signal) if self.training else signal.sign()
        return self.head(code)  # type: ignore[no-any-return]  # a module's call is untyped


@difficult("binary_codes_by_continuation", "hidden tanhs are made to saturate step by step")
def binary_codes(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    model, order = Hashing(), run.generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    before = accuracy(model, unseen)
    for step in range(400):
        model.slope = 1 + step / 20
        x, y = drawn(data, 64, order)
        loss = functional.cross_entropy(model(x), y, label_smoothing=0.3)
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    run.improves("accuracy of codes", before, accuracy(model, unseen), at_least=0.9)


@difficult("heat_equation_without_data", "the loss is of second derivatives, and beside it a boundary's")
def heat(run: Training) -> None:
    order = run.generator()
    model = dense([1, 32, 32, 1], nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    ends, line = torch.tensor([[0.0], [1.0]]), torch.linspace(0, 1, 200)[:, None]
    run.watch(model, optimizer)

    def error() -> float:
        with torch.no_grad():
            return float((model(line) - torch.sin(2 * math.pi * line)).abs().mean())

    before = error()
    for _ in range(600):
        x = torch.rand(64, 1, generator=order).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        residual = ((bend + 4 * math.pi**2 * torch.sin(2 * math.pi * x)) ** 2).mean()
        boundary = (model(ends) ** 2).mean()
        loss = 0.01 * residual + 10 * boundary
        update(optimizer, loss)
        schedule.step()
        run.log(loss=loss, residual_loss=residual, boundary_loss=boundary)
        run.step()
    run.improves("distance from the solution", before, error(), at_most=0.1)


@difficult("hard_triplets_of_digits", "the hardest triplets keep the loss at its margin for long")
def triplets(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    model, order = dense([64, 96, 16]), run.generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    for _ in range(500):
        x, y = drawn(data, 64, order)
        point = functional.normalize(model(x), dim=1)
        apart = (2 - 2 * point @ point.T).clamp_min(1e-6).sqrt()
        same = y[:, None] == y[None]
        loss = functional.relu((apart * same).max(1)[0] - (apart + 10 * same).min(1)[0] + 0.3).mean()
        update(optimizer, loss)
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        nearest = torch.cdist(model(unseen[0]), model(data[0])).argmin(1)
    right = (data[1][nearest] == unseen[1]).float().mean()
    run.improves("nearest neighbours of the same class", None, float(right), at_least=0.93)


@difficult("half_of_weights_pruned_midway", "four fifths of the weights are set to zero in three steps")
def pruned(run: Training) -> None:
    data, unseen = shipped("digits", run.seed)
    model, order = dense([64, 96, 96, 10]), run.generator()
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    masks = [torch.ones_like(weight) for weight in weights]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.watch(model, optimizer)
    before = accuracy(model, unseen)
    shares = {150: 0.4, 220: 0.65, 290: 0.8}
    for step in range(450):
        if step in shares:
            masks = [
                (weight.abs() > weight.abs().quantile(shares[step])).float() * mask
                for weight, mask in zip(weights, masks, strict=True)
            ]
        x, y = drawn(data, 64, order)
        loss = functional.cross_entropy(model(x), y)
        update(optimizer, loss)
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                weight.mul_(mask)
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", before, accuracy(model, unseen), at_least=0.93)
