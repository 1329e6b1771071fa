"""Layers have hooks only in passes that are measured; the outputs of other passes are found in the graph of their loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from watchstep import Cadence, CaptureConfig, Hook, open_run
from watchstep.pytorch import internals

BAD = 9
MEASURED = ("sum", "count", "nan", "max")
RARELY = CaptureConfig(
    collections={"losses": Cadence(), "activations": Cadence(every=5), "inputs": Cadence(every=5)}
)


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    yield
    internals.look_up()


class Attention(nn.Module):
    """Views of one projection, and two sums that save nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.view(*part.shape[:2], 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, 2)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return mixed


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(6, 8), Attention()
        self.wide, self.act, self.narrow, self.head = (
            nn.Linear(8, 16),
            nn.GELU(),
            nn.Linear(16, 8),
            nn.Linear(8, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.tokens(x.argmax(-1)))
        logits: Tensor = self.head(x + self.narrow(self.act(self.wide(x))))
        return logits[:, 0]


class Experts(nn.Module):
    """Each pass calls another one of two layers of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.act, self.head = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(2)),
            nn.ReLU(),
            nn.Linear(6, 6),
        )
        self.calls = 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.act(self.experts[self.calls % 2](x)))
        return logits[:, 0]


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(5, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True),
        nn.MaxPool1d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 6),
    )  # fmt: skip


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 6))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = layers(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        logits: Tensor = self.head(hidden)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "images": images,
    "layers": layers,
    "experts": Experts,
    "checkpointed": Checkpointed,
}


def make_bad(model: nn.Module) -> None:
    """Damage a parameter in the middle of the model."""
    parameters = list(model.parameters())
    with torch.no_grad():
        parameters[len(parameters) // 2].fill_(torch.nan)


def train(
    folder: Path, model: nn.Module, before_step: Callable[[int], None] = lambda _step: None
) -> list[float]:
    """Train for ten steps; the last one is bad. Returns the losses."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with Hook(folder, run="r", config=RARELY) as hook:
        hook.watch(model, optimizer)
        for step in range(BAD + 1):
            if step == BAD:
                make_bad(model)
            before_step(step)
            x = torch.randn(4, 5, 6, generator=generator)
            optimizer.zero_grad()
            output = model(x)
            loss = nn.functional.cross_entropy(output if output.ndim == 2 else output[:, 0], torch.arange(4))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def outputs_of_bad_step(folder: Path) -> dict[str, tuple[Any, ...]]:
    run = open_run(folder / "default" / "r")
    rows = {}
    for name in run.tensors("activations"):
        statistics = run.tensor(name).statistics()
        if BAD in statistics["step"].to_pylist():
            place = statistics["step"].to_pylist().index(BAD)
            rows[name] = tuple(
                str(statistics[column].to_pylist()[place])
                for column in MEASURED
                if column in statistics.column_names
            )
    return rows


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_of_a_bad_pass_are_those_that_hooks_see(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    plain = train(tmp_path / "graph", MODELS[kind]())
    found = outputs_of_bad_step(tmp_path / "graph")
    internals.look_up(absent={"torch.Tensor._base"})
    torch.manual_seed(3)
    assert str(train(tmp_path / "hooks", MODELS[kind]())) == str(plain)
    seen = outputs_of_bad_step(tmp_path / "hooks")
    assert seen
    assert {name: found.get(name) for name in seen} == seen
    assert any(float(row[MEASURED.index("nan")]) > 0 for row in found.values())


def layer_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules() if module is not model)


@pytest.mark.parametrize(("kind", "resting"), [("language", 0), ("images", 0), ("checkpointed", 6)])
def test_layers_have_hooks_only_in_measured_passes(tmp_path: Path, kind: str, resting: int) -> None:
    model, present = MODELS[kind](), {}

    def count(step: int) -> None:
        present[step] = layer_hooks(model)

    train(tmp_path, model, count)
    leaves = sum(next(module.children(), None) is None for module in model.modules())
    # Before each step: those of the pass before it. Steps 0 and 5 are measured; the first three passes show the graph.
    assert present[1] == present[2] == leaves
    assert present[5] == resting
    assert present[6] == leaves
    assert present[8] == resting
    assert layer_hooks(model) == 0


def test_another_thread_may_call_the_model_while_hooks_come_and_go(tmp_path: Path) -> None:
    model, ended, errors = images(), threading.Event(), []

    def infer() -> None:
        while not ended.is_set():
            try:
                with torch.no_grad():
                    model(torch.randn(4, 5, 6))
            except Exception as error:  # noqa: BLE001 - the test asserts that there is none
                errors.append(error)

    thread = threading.Thread(target=infer)
    thread.start()
    try:
        train(tmp_path, model)
    finally:
        ended.set()
        thread.join()
    assert errors == []


def test_a_hook_that_another_thread_has_removed_does_nothing(tmp_path: Path) -> None:
    model = layers()
    with Hook(tmp_path, config=RARELY) as hook:
        hook.watch(model)
        for module in model:
            for called in tuple(module._forward_hooks.values()):
                assert (
                    called(module, (torch.ones(2, 6),), torch.ones(2, 6)) is None
                )  # as PyTorch calls it without keywords
