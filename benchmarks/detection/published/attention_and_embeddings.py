"""Faults in attention, embeddings and losses on pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, Pair, copied_tokens, shipped, tokens_with_keyword
from benchmarks.detection.models import BagOfTokens, LanguageModel, dense
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


@published(
    "attention_rate_without_warmup",
    {"loss_not_decreasing"},
    "Popel and Bojar, training tips for the transformer (2018); Xiong et al. (ICML 2020): warm-up is needed",
    "post-norm transformer, Adam at a constant 0.1",
)
def rate_without_warmup(seed: int, faulty: bool) -> Built:
    """The first updates are as large as the weights; after them the loss stays at that of a guess."""
    data, unseen = copied_tokens(seed, 800, 12, 12), copied_tokens(seed + 50, 100, 12, 12)
    model = LanguageModel(12, 12)
    optimizer = Adam(model.parameters(), 0.1 if faulty else 3e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 450, seed, unseen)


class Pooled(nn.Module):
    """One attention layer over tokens, averaged over those that are there (not 0), and classified."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        held = self.embedding(x)
        mixed, _ = self.attention(held, held, held, key_padding_mask=x == 0)
        return self.head(mixed.mean(1))  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "attention_all_padding",
    {"nan_or_inf"},
    "pytorch/pytorch#41508, MultiheadAttention gives NaN where everything is masked",
    "an empty sequence in the batch of step 110",
    onset=110,
)
def all_padding(seed: int, faulty: bool) -> Built:
    """A softmax over nothing but -inf."""
    x, y = tokens_with_keyword(seed, 1000, 10, 60)
    unseen, labels = tokens_with_keyword(seed + 50, 200, 10, 60)

    def emptied(step: int, inputs: Tensor, classes: Tensor) -> Pair:
        if step == 110:
            inputs = inputs.clone()
            inputs[5] = 0
        return inputs, classes

    model = Pooled(61, 16)
    batches = Batches(x + 1, y, 32, 220, seed, (unseen + 1, labels), change=emptied if faulty else None)
    return model, Adam(model.parameters(), 3e-3), functional.cross_entropy, batches


class OneHead(nn.Module):
    """Dot-product attention written by hand, over the rows of a digit."""

    def __init__(self, width: int, *, scaled: bool) -> None:
        super().__init__()
        self.row, self.position = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) * 0.3)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.weighting, self.head = nn.Softmax(-1), nn.Linear(8 * width, 10)
        self.scale = width**-0.5 if scaled else 1.0
        if not scaled:
            for layer in (self.row, self.query, self.key):
                nn.init.normal_(layer.weight, 0.0, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.row(x.view(-1, 8, 8)) + self.position
        scores = self.query(rows) @ self.key(rows).transpose(1, 2) * self.scale
        mixed = self.weighting(scores) @ self.value(rows)
        return self.head(mixed.flatten(1))  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "attention_unscaled_scores",
    {"vanishing_gradient"},
    "Vaswani et al. (NeurIPS 2017), section 3.2.1: large dot products push softmax where its gradient is nothing",
    "scores are not divided, and weights are from N(0, 4²)",
)
def unscaled_scores(seed: int, faulty: bool) -> Built:
    """Softmax answers one-hot, and queries and keys get next to no gradient."""
    data, unseen = shipped("digits", seed)
    model = OneHead(64, scaled=not faulty)
    return (
        model,
        SGD(model.parameters(), 1e-3 if faulty else 0.1),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


class Tied(nn.Module):
    """Next tokens from the embedding of the present one, with one matrix for both ends."""

    def __init__(self, vocabulary: int, width: int, deviation: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixing = nn.Linear(width, width)
        self.last = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, 0.0, deviation)
        nn.init.normal_(self.last.weight, 0.0, deviation)

    def forward(self, x: Tensor) -> Tensor:
        held = self.embedding(x)
        return self.last(held + self.mixing(held))  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "embedding_logits_begin_large",
    {"poor_initialization"},
    "Karpathy, a recipe for training neural networks (2019): verify the loss at the first step",
    "embedding and output weights from N(0, 1) at a width of 128",
)
def logits_begin_large(seed: int, faulty: bool) -> Built:
    """The first loss is some times ln(50), which a guess would have."""
    tokens = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(seed))
    x, y = tokens, (tokens * 7 + 3) % 50
    model = Tied(50, 128, 1.0 if faulty else 0.05)
    return model, Adam(model.parameters(), 1e-3), functional.cross_entropy, Batches(x, y, 32, 250, seed)


@published(
    "embedding_plain_sgd",
    {"slow_convergence"},
    "Humbatova et al. (ICSE 2020), suboptimal learning rate; DeepFD (ICSE 2022), learning rate and optimizer",
    "embeddings, of which each batch touches few, under SGD with a rate of 0.01",
)
def plain_sgd(seed: int, faulty: bool) -> Built:
    """Each embedding gets a hundredth of a step once in a while."""
    data, unseen = tokens_with_keyword(seed, 8000, 12, 200), tokens_with_keyword(seed + 50, 300, 12, 200)
    model = BagOfTokens(200, 24, 2)
    optimizer = SGD(model.parameters(), 0.01) if faulty else Adam(model.parameters(), 0.01)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


class Distance(nn.Module):
    """The distance of two halves of an input, each embedded by the same network."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.body, self.guard = dense([64, 32, 8], nn.Tanh), 1e-6 if guarded else 0.0

    def forward(self, x: Tensor) -> Tensor:
        apart = self.body(x[:, :64]) - self.body(x[:, 64:])
        return (apart.pow(2).sum(1) + self.guard).sqrt()  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "pairs_root_of_zero",
    {"nan_or_inf"},
    "PyTorch's issues, several times: the gradient of sqrt (and of norms by hand) at zero is not finite",
    "an example is paired with itself at step 70",
    onset=70,
)
def root_of_zero(seed: int, faulty: bool) -> Built:
    """The loss stays finite; Zero times infinity comes in the backward pass."""
    (x, y), _ = shipped("digits", seed)
    other = torch.arange(len(x)).roll(1)  # never itself
    pairs, same = torch.cat([x, x[other]], 1), (y == y[other]).float()

    def itself(step: int, inputs: Tensor, labels: Tensor) -> Pair:
        if step == 70:
            inputs, labels = inputs.clone(), labels.clone()
            inputs[0, 64:], labels[0] = inputs[0, :64], 1.0
        return inputs, labels

    def loss(distance: Tensor, labels: Tensor) -> Tensor:
        return (labels * distance.pow(2) + (1 - labels) * (2.0 - distance).clamp(min=0).pow(2)).mean()

    model = Distance(guarded=not faulty)
    return model, Adam(model.parameters(), 2e-3), loss, Batches(pairs, same, 32, 200, seed, change=itself)
