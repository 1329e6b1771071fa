"""The trainings that are slowed down: steps from a second to a few milliseconds, of one model or two, with few modules or hundreds."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_WORDS = 2000
_WIDTH = 512
_ACTIONS = 6


class Transformer(nn.Module):
    """6 encoder layers of width 512, 21 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits.transpose(1, 2)


class _Block(nn.Module):
    """A block of the character GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.bend, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.dropout, self._heads = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self._heads, -1).transpose(1, 2)
            for part in self.projected(self.before(x)).split(width, 2)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attended(attended.transpose(1, 2).reshape(batch, length, width)))
        narrow = self.narrow(self.bend(self.wide(self.between(x))))
        output: Tensor = x + self.dropout(narrow)
        return output


_LETTERS, _LENGTH = 65, 64


class CharacterGPT(nn.Module):
    """4 blocks of width 96, 0.46 M parameters, 40 leaf modules."""

    def __init__(self) -> None:
        super().__init__()
        width = 96
        self.letters, self.places = nn.Embedding(_LETTERS, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


def _mlp() -> nn.Module:
    """10 M parameters in six layers."""
    width = 1410
    hidden = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    """0.3 M parameters in six convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        stride = 2 if before != after and before > 3 else 1
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _many_modules() -> nn.Module:
    """400 modules with tiny tensors."""
    return nn.Sequential(*(module for _ in range(200) for module in (nn.Linear(8, 8), nn.Tanh())))


class Encoder(nn.Module):
    """2 encoder layers of width 128 with a classifier, as of a small BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens))[:, 0])
        return logits


_NOISE = 64


def _generator() -> nn.Module:
    """From noise to images of 32 by 32 pixels, as in DCGAN."""
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(_NOISE, 128, 4, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
    ]
    for before, after in ((128, 64), (64, 32)):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())


def _discriminator() -> nn.Module:
    """From images to one logit."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after in ((32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(128, 1, 4), nn.Flatten(0))


Watched = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and one batch that every step repeats.

    Attributes:
        micro_batches: times that a step computes the batch before its update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor
    micro_batches: int = 1

    @property
    def watched(self) -> tuple[Watched, ...]:
        """The models that are watched, and their optimizers; the first one counts the steps."""
        return ((self.model, self.optimizer),)

    def backward(self) -> Tensor:
        """Forward and backward of one step; the last loss."""
        self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            loss = functional.cross_entropy(self.model(self.inputs), self.labels)
            if self.micro_batches > 1:
                loss = loss / self.micro_batches
            loss.backward()
        return loss

    def update(self) -> None:
        """The optimizer's part of the step."""
        self.optimizer.step()


@dataclass(frozen=True)
class AdversarialTraining(Training):
    """A generator, and a discriminator, ``model``, which is updated before it.

    Attributes:
        generator: the generator.
        generator_optimizer: its optimizer.
    """

    generator: nn.Module = field(default_factory=_generator)
    generator_optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        optimizer = torch.optim.AdamW(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        object.__setattr__(self, "generator_optimizer", optimizer)

    @property
    def watched(self) -> tuple[Watched, ...]:
        return ((self.generator, self.generator_optimizer), (self.model, self.optimizer))

    def backward(self) -> Tensor:
        made = self.generator(torch.randn(len(self.inputs), _NOISE, 1, 1))
        self.optimizer.zero_grad()
        _judged(self.model(self.inputs), 1.0).backward()
        _judged(self.model(made.detach()), 0.0).backward()
        self.optimizer.step()
        self.generator_optimizer.zero_grad()
        loss = _judged(self.model(made), 1.0)
        loss.backward()
        return loss

    def update(self) -> None:
        self.generator_optimizer.step()


@dataclass(frozen=True)
class PolicyTraining(Training):
    """An actor and a critic, parts of ``model``: as in PPO (Schulman et al. 2017), the program calls them and never the model itself."""

    def backward(self) -> Tensor:
        actor, critic = self.model.children()
        self.optimizer.zero_grad()
        chosen = functional.log_softmax(actor(self.inputs), -1).gather(1, self.labels[:, None])[:, 0]
        ratio = torch.exp(chosen + math.log(_ACTIONS))  # to a policy that chooses each action as often
        reward = (self.labels == 0).float()
        values = critic(self.inputs)[:, 0]
        advantage = (reward - values).detach()
        gains = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = functional.mse_loss(values, reward) - gains.mean()
        loss.backward()
        return loss


@dataclass(frozen=True)
class TrainerTraining(Training):
    """A step of the Trainer of transformers, on its own: its forward and backward passes, its clipping, its optimizer and its schedule.

    Attributes:
        trainer: the Trainer, which made the optimizer's wrapper.
    """

    trainer: Any = field(init=False)

    def __post_init__(self) -> None:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # nothing is written
            gradient_accumulation_steps=self.micro_batches,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        )
        constant = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        trainer = Trainer(self.model, arguments, optimizers=(self.optimizer, constant))
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(self.model, self.optimizer)
        trainer.current_gradient_accumulation_steps = self.micro_batches  # which its own loop sets
        object.__setattr__(self, "trainer", trainer)

    def backward(self) -> Tensor:
        self.model.zero_grad()
        for _ in range(self.micro_batches):
            inputs = {"input_ids": self.inputs, "labels": self.labels}
            loss: Tensor = self.trainer.training_step(self.model, inputs)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        return loss

    def update(self) -> None:
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()


def _judged(logits: Tensor, truth: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


@dataclass(frozen=True)
class Workload:
    """A training to measure.

    Attributes:
        title: in the table.
        make: model, inputs and labels.
        steps: of one round.
        warm_steps: before the first round, so that a recorder that adapts has adapted.
        micro_batches: of a step.
        kind: class of the training.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    steps: int
    warm_steps: int
    micro_batches: int = 1
    kind: type[Training] = Training

    def start(self) -> Training:
        """The training at its first step, the same each time."""
        torch.manual_seed(0)
        model, inputs, labels = self.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return self.kind(model, optimizer, inputs, labels, self.micro_batches)


def _transformer_at(batch: int, length: int) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        tokens = torch.randint(_WORDS, (2, batch, length))
        return Transformer(), tokens[0], tokens[1]

    return make


def _text() -> tuple[nn.Module, Tensor, Tensor]:
    letters = torch.randint(_LETTERS, (2, 12, _LENGTH))
    return CharacterGPT(), letters[0], letters[1]


def _images() -> tuple[nn.Module, Tensor, Tensor]:
    return _cnn(), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def _rows() -> tuple[nn.Module, Tensor, Tensor]:
    return _mlp(), torch.randn(64, 1410), torch.randint(10, (64,))


def _sentences() -> tuple[nn.Module, Tensor, Tensor]:
    return Encoder(), torch.randint(_WORDS, (16, 64)), torch.randint(2, (16,))


def _classified() -> tuple[nn.Module, Tensor, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(vocab_size=_WORDS, max_position_embeddings=64, num_labels=2, **size)
    return BertForSequenceClassification(config), *_sentences()[1:]


def _pictures() -> tuple[nn.Module, Tensor, Tensor]:
    return _discriminator(), torch.rand(32, 3, 32, 32), torch.ones(32)


def _observations() -> tuple[nn.Module, Tensor, Tensor]:
    parts = {name: _policy_network(outputs) for name, outputs in (("actor", _ACTIONS), ("critic", 1))}
    return nn.ModuleDict(parts), torch.randn(64, 17), torch.randint(_ACTIONS, (64,))


def _policy_network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def _few_rows() -> tuple[nn.Module, Tensor, Tensor]:
    return _many_modules(), torch.randn(16, 8), torch.randint(8, (16,))


WORKLOADS = {
    "transformer": Workload("transformer 21 M, 8x128 tokens", _transformer_at(8, 128), 1, 101),
    "transformer_small": Workload("transformer 21 M, 2x32 tokens", _transformer_at(2, 32), 4, 110),
    "mlp": Workload("MLP 10 M, batch 64", _rows, 5, 120),
    "cnn": Workload("CNN 0.3 M, batch 16", _images, 20, 200),
    "gpt": Workload("character GPT 0.46 M, 4 micro-batches of 12x64", _text, 4, 110, 4),
    "encoder": Workload("encoder of two layers, 2 micro-batches of 16x64 tokens", _sentences, 4, 110, 2),
    "dcgan": Workload("DCGAN, batch 32", _pictures, 4, 110, kind=AdversarialTraining),
    "ppo": Workload("PPO, actor and critic, batch 64", _observations, 40, 200, kind=PolicyTraining),
    "bert": Workload(
        "BERT of two layers in the Trainer, 2 micro-batches of 16x64 tokens",
        _classified,
        4,
        110,
        2,
        TrainerTraining,
    ),
    "modules": Workload("400 modules, 8 micro-batches", _few_rows, 4, 110, 8),
}
QUICK_WORKLOADS = ("mlp",)
