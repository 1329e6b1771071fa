"""More architectures that are meant to be as they are: closed gates, idle experts, optimizers by turns, frozen copies, frozen statistics."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks.detection.data import Batches, images, shipped
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


class ConvolutionalHighway(nn.Module):
    """A highway layer of convolutions."""

    def __init__(self, channels: int, bias: float) -> None:
        super().__init__()
        self.change = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation, self.opened = nn.Tanh(), nn.Sigmoid()
        nn.init.constant_(self.gate.bias, bias)  # type: ignore[arg-type]  # a Conv2d's

    def forward(self, x: Tensor) -> Tensor:
        share: Tensor = self.opened(self.gate(x))
        changed: Tensor = self.activation(self.change(x))
        return share * changed + (1 - share) * x


@difficult(
    "highway_of_convolutions", "twelve highway layers of convolutions, whose gates begin at a bias of -5"
)
def highway_of_convolutions(run: Training) -> None:
    """300 steps."""
    (x, y), (unseen, labels) = images(run.seed)
    layers = (ConvolutionalHighway(8, -5.0) for _ in range(12))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(512, 10))
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 300, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


class LastOfLSTM(nn.Module):
    """PyTorch's LSTM, whose input gates begin at a bias and whose forget gates begin at its opposite."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, width, batch_first=True), nn.Linear(width, 2)
        with torch.no_grad():
            biases = self.cell.get_parameter("bias_ih_l0")
            biases[:width] = bias
            biases[width : 2 * width] = -bias

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cell(x)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


@difficult(
    "lstm_with_chrono_gates",
    "the biases of PyTorch's LSTM begin at -4 and 4, so that it remembers long (Tallec and Ollivier, 2018)",
)
def lstm_with_chrono_gates(run: Training) -> None:
    """350 steps of sums of 24 values."""
    x, y = _sums(run, 24)
    model = LastOfLSTM(24, -4.0)
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = _classify(run, model, optimizer, Batches(x, y, 32, 350, run.seed))
    run.improves("loss", losses[0], sum(losses[-30:]) / 30, at_most=0.4)


class Memory(nn.Module):
    """A sum over time to which a gate, closed at first, lets little come: gates and bounds are modules."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.width = width
        self.write, self.read = nn.Linear(1 + width, width), nn.Linear(1 + width, width)
        self.gate, self.squash, self.head = nn.Sigmoid(), nn.Tanh(), nn.Linear(width, 2)
        nn.init.constant_(self.write.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.new_zeros(len(x), self.width)
        for at in range(x.shape[1]):
            both = torch.cat([x[:, at], memory], 1)
            share = self.gate(self.write(both))
            memory = (1 - share) * memory + share * self.squash(self.read(both))
        logits: Tensor = self.head(memory)
        return logits


@difficult("gates_of_a_memory", "a minimal gated unit written out, whose only gate begins at -5")
def gates_of_a_memory(run: Training) -> None:
    """400 steps of sums of 16 values."""
    x, y = _sums(run, 16)
    model = Memory(32, -5.0)
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = _classify(run, model, optimizer, Batches(x, y, 32, 400, run.seed))
    run.improves("loss", losses[0], sum(losses[-30:]) / 30, at_most=0.4)


class Routed(nn.Module):
    """A mixture of experts, of which each example goes to the best few."""

    def __init__(self, experts: int, width: int, best: int, idle: float = 0.0) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(64, 32), nn.Linear(32, experts), nn.Linear(32, 10)
        self.experts = nn.ModuleList(dense([32, width, 32]) for _ in range(experts))
        self.best = best
        with torch.no_grad():
            self.router.bias[0] = -idle

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))
        weights, chosen = self.router(hidden).softmax(1).topk(self.best, dim=1)
        output = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                output = output.index_add(0, rows, weights[rows, place].unsqueeze(1) * expert(hidden[rows]))
        logits: Tensor = self.head(output)
        return logits


def _route(run: Training, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, steps, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "expert_seldom_chosen", "one of six experts is chosen for few examples, and in many steps for none"
)
def expert_seldom_chosen(run: Training) -> None:
    """450 steps; each example goes to one expert."""
    model = Routed(6, 32, 1, idle=2.5)
    _route(run, model, Adam(model.parameters(), 2e-3), 450)


@difficult("two_best_experts", "each example goes to two of eight experts, of which one begins without any")
def two_best_experts(run: Training) -> None:
    """400 steps."""
    model = Routed(8, 24, 2, idle=8.0)
    _route(run, model, AdamW(model.parameters(), 2e-3, weight_decay=0.05), 400)


@difficult("experts_of_the_switch", "one expert of four takes nearly all, since nothing balances them")
def experts_of_the_switch(run: Training) -> None:
    """400 steps of SGD with momentum; unbalanced gates feed those that are fed."""
    model = Routed(4, 32, 1, idle=1.0)
    _route(run, model, SGD(model.parameters(), 0.05, momentum=0.9), 400)


@difficult(
    "halves_in_turns_of_fifty", "only the optimizer whose turn it is clears gradients and steps, for 50 steps"
)
def halves_in_turns_of_fifty(run: Training) -> None:
    """500 steps; the second optimizer is made when its first turn begins."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 48, 10])
    parts = ([*model[0].parameters(), *model[4].parameters()], [*model[2].parameters()])
    optimizers: dict[int, Optimizer] = {}
    run.watch(model)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 500, run.seed)):
        turn = step // 50 % 2
        optimizer = optimizers.setdefault(turn, Adam(parts[turn], 2e-3))
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


class WithTeacher(nn.Module):
    """A student and its moving average, which are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.student = dense([64, 64, 10])
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    def follow(self, share: float) -> None:
        """Move the teacher a share of the way to the student."""
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                one.lerp_(other, share)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x + 0.1 * torch.randn_like(x)), wanted


@difficult(
    "teacher_inside_the_model",
    "an average of the model teaches it from within: its term grows from zero while labels are learnt",
)
def teacher_inside_the_model(run: Training) -> None:
    """400 steps; the term that keeps the student near the teacher rises as the student learns."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = WithTeacher()
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 400, run.seed):
        given, taught = model(inputs)
        labelled = functional.cross_entropy(given, wanted)
        consistency = functional.mse_loss(given.softmax(1), taught.softmax(1))
        optimizer.zero_grad()
        (labelled + 5.0 * consistency).backward()
        optimizer.step()
        model.follow(0.02)
        run.log(consistency=consistency, labelled=labelled, loss=labelled + 5.0 * consistency)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model.teacher, unseen, labels), at_least=0.8)


@difficult(
    "momentum_encoder_inside",
    "a queue of keys of a momentum encoder: the loss rises while the queue fills, then falls (MoCo)",
)
def momentum_encoder_inside(run: Training) -> None:
    """400 steps; 256 keys of earlier batches are negatives."""
    (x, _), (unseen, labels) = shipped("digits", run.seed)
    model = nn.ModuleDict({"query": dense([64, 64, 32])})
    model["key"] = copy.deepcopy(model["query"]).requires_grad_(requires_grad=False)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.watch(model, optimizer)
    queue = torch.empty(0, 32)
    for inputs, _ in Batches(x, x, 32, 400, run.seed):
        one, other = (inputs * (torch.rand_like(inputs) < 0.8) for _ in range(2))
        query = functional.normalize(model["query"](one), dim=1)
        with torch.no_grad():
            for held, own in zip(model["key"].parameters(), model["query"].parameters(), strict=True):
                held.lerp_(own, 0.05)
            key = functional.normalize(model["key"](other), dim=1)
        own_key = (query * key).sum(1, keepdim=True)
        logits = torch.cat([own_key, query @ queue.T], 1) / 0.2
        loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([key, queue])[:256]
        run.log(loss=loss)
        run.step()
    run.improves("accuracy of neighbours", 0.1, _neighbours(model["query"], unseen, labels), at_least=0.85)


@difficult(
    "frozen_copy_as_anchor",
    "a trained model learns new labels, held near a frozen copy of what it was: that term begins at exactly zero",
)
def frozen_copy_as_anchor(run: Training) -> None:
    """300 steps of two terms, of which the one must rise."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 10])
    _taught(model, x[y < 5], y[y < 5], run)
    anchor = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    first = _accuracy(model, unseen, labels)
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        given, before = model(inputs), anchor(inputs)
        held = functional.kl_div(
            given.log_softmax(1), before.log_softmax(1), reduction="batchmean", log_target=True
        )
        learnt = functional.cross_entropy(given, wanted)
        optimizer.zero_grad()
        (learnt + 0.02 * held).backward()
        optimizer.step()
        run.log(anchor=held, loss=learnt + 0.02 * held)
        run.step()
    run.improves("accuracy", first, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "batch_norm_in_eval_with_its_scale",
    "BatchNorm of a trained model in eval() while its scales and all weights learn on, on noisier images",
)
def batch_norm_in_eval_with_its_scale(run: Training) -> None:
    """300 steps of AdamW."""
    (x, y), (unseen, labels) = images(run.seed)
    noise = run.generator(4)
    noisy, unseen = (held + 0.15 * torch.randn(held.shape, generator=noise) for held in (x, unseen))
    model = convolutional(norm=True)
    _taught(model, x, y % 3, run)
    model[7] = nn.Linear(256, 10)
    first = _accuracy(model.eval(), unseen, labels)
    model.train()
    _norms_in_eval(model)
    optimizer = AdamW(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(noisy, y, 32, 300, run.seed))
    run.improves("accuracy", first, _accuracy(model.eval(), unseen, labels), at_least=0.8)


@difficult(
    "batch_norm_of_a_frozen_backbone",
    "the backbone is frozen and in eval(), BatchNorm's scales too, as detectors are tuned; the head learns",
)
def batch_norm_of_a_frozen_backbone(run: Training) -> None:
    """300 steps of SGD."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional(norm=True)
    _taught(model, x, y % 5, run)
    model[7] = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    first = _accuracy(model.eval(), unseen, labels)
    model.train()
    for place in range(6):
        model[place].requires_grad_(requires_grad=False)
    _norms_in_eval(model)
    optimizer = SGD([one for one in model.parameters() if one.requires_grad], 0.05, momentum=0.9)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 300, run.seed))
    run.improves("accuracy", first, _accuracy(model.eval(), unseen, labels), at_least=0.85)


def _sums(run: Training, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (n, length, 1) of random numbers, and whether each one's sum is above zero."""
    x = torch.randn(1500, length, 1, generator=run.generator())
    return x, (x.sum((1, 2)) > 0).long()


def _norms_in_eval(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _classify(run: Training, model: nn.Module, optimizer: Optimizer, batches: Batches) -> list[float]:
    losses = []
    for inputs, wanted in batches:
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    return losses


def _taught(model: nn.Module, x: Tensor, y: Tensor, run: Training) -> None:
    """Train without a hook."""
    optimizer = Adam(model.parameters(), 2e-3)
    for inputs, wanted in Batches(x, y, 32, 200, run.seed):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def _neighbours(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """How often the nearest other example by the model's output has the same label."""
    with torch.no_grad():
        code = functional.normalize(model(x), dim=1)
    likeness = code @ code.T
    likeness.fill_diagonal_(-2.0)
    return float((y[likeness.argmax(1)] == y).float().mean())
