"""Layers have hooks only in passes that are measured; the outputs of other passes are found in the graph of their loss."""

from __future__ import annotations

import threading
import time
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


class Changing(nn.Module):
    """A model that computes something else in the bad pass, with the same kinds of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts, self.acts = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(2)),
            nn.ModuleList(nn.GELU() for _ in range(2)),
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.hidden(self.first(x), int(self.calls == BAD + 1)))
        return logits[:, 0]

    def hidden(self, x: Tensor, chosen: int) -> Tensor:
        raise NotImplementedError


class Frozen(Changing):
    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)

    def hidden(self, x: Tensor, chosen: int) -> Tensor:
        hidden: Tensor = self.acts[1 - chosen](self.experts[1 - chosen](x))
        return hidden


class SharedCasts(Changing):
    """Autocast casts the parameters of a layer once for all its calls."""

    def hidden(self, x: Tensor, chosen: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for place in (0, 1, chosen):
                x = nn.functional.gelu(self.experts[place](x))
        return x.float()


class Alike(Changing):
    """Layers without parameters, of which only the third pass and the bad one call the second."""

    def hidden(self, x: Tensor, chosen: int) -> Tensor:
        hidden: Tensor = self.acts[int(chosen or self.calls == 3)](self.experts[0](x))
        return hidden


class CalledAgain(nn.Module):
    """A model that the program calls again, without gradients, before the backward pass of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.act, self.head = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.act(self.hidden(x[:, 0])))
        return logits


class ScaleFunction(torch.autograd.Function):
    """A function with an attribute that is called like a method of all functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "scale"
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = ScaleFunction.apply(x)  # type: ignore[no-untyped-call]
        return scaled


class Recomputing(nn.Module):
    """A layer that is checkpointed by itself, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.calls = 0

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ self.weight).tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.compute, x, use_reentrant=False)
        return hidden


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


@pytest.mark.parametrize("kind", [Frozen, SharedCasts, Alike])
def test_no_output_is_named_that_another_layer_has_made(tmp_path: Path, kind: type[Changing]) -> None:
    torch.manual_seed(3)
    train(tmp_path / "graph", kind())
    found = outputs_of_bad_step(tmp_path / "graph")
    internals.look_up(absent={"torch.Tensor._base"})
    torch.manual_seed(3)
    train(tmp_path / "hooks", kind())
    assert found.items() <= outputs_of_bad_step(tmp_path / "hooks").items()


class Overflowing(nn.Module):
    """A model that changes the output of a layer in place, and overflows in the bad pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x[:, 0]).exp_())
        return logits


@pytest.mark.parametrize("absent", [set(), {"torch.Tensor._base"}])
def test_values_that_an_operation_wrote_in_place_are_not_those_of_the_layer(
    tmp_path: Path, absent: set[str]
) -> None:
    def overflow(step: int) -> None:
        if step == BAD:
            nn.init.constant_(model.hidden.bias, 200.0)

    internals.look_up(absent=absent)
    model = Overflowing()
    train(tmp_path, model, overflow)
    assert "hidden:output" not in outputs_of_bad_step(tmp_path)


def test_an_output_of_the_model_is_that_of_the_pass_of_the_loss(tmp_path: Path) -> None:
    model = CalledAgain()
    with Hook(tmp_path, run="r", config=RARELY) as hook:
        hook.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(BAD + 1):
            optimizer.zero_grad()
            output = model(torch.ones(4, 5, 6))
            again = None
            if step == BAD:
                with torch.no_grad():
                    again = model(torch.full((4, 5, 6), 2.0))
            loss = output.mean() * (torch.nan if step == BAD else 1.0)
            loss.backward()
            optimizer.step()
    del again
    (_, count, nan, _) = outputs_of_bad_step(tmp_path)["head:output"]
    assert (count, nan) == ("24", "0")
    assert float(outputs_of_bad_step(tmp_path)["head:output"][0]) == pytest.approx(output.sum().item())


def test_a_function_with_an_attribute_called_name_loses_no_loss(tmp_path: Path) -> None:
    train(tmp_path, nn.Sequential(nn.Linear(6, 6), Scale(), nn.Linear(6, 6)))
    assert len(open_run(tmp_path / "default" / "r").tensor("loss").statistics()) == BAD + 1


class OnlyOnce(torch.autograd.graph.saved_tensors_hooks):
    """Packing that releases what it has unpacked, as offloading of activations does."""

    def __init__(self) -> None:
        stored: list[Tensor | None] = []

        def pack(tensor: Tensor) -> int:
            stored.append(tensor.detach())
            return len(stored) - 1

        def unpack(place: int) -> Tensor:
            tensor, stored[place] = stored[place], None
            if tensor is None:
                raise LookupError("unpacked twice")
            return tensor

        super().__init__(pack, unpack)


def test_what_only_the_loss_has_packed_is_not_unpacked(tmp_path: Path) -> None:
    model = layers()
    with Hook(tmp_path, run="r", config=RARELY) as hook:
        hook.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(BAD + 1):
            optimizer.zero_grad()
            output = model(torch.ones(4, 6))
            with OnlyOnce():
                loss = nn.functional.cross_entropy(output, torch.arange(4))
                loss = loss * (torch.nan if step == BAD else 1.0)
            loss.backward()
            optimizer.step()


def test_a_layer_that_is_checkpointed_by_itself_is_not_computed_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer := Recomputing(), nn.Linear(6, 6))
    train(tmp_path, model)
    assert layer.calls == 2 * (BAD + 1)


class Repeated(nn.Module):
    """A layer that returns its input in many steps of a loop, and whose output no function saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.head = nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        total = torch.zeros(())
        for _ in range(600):
            total = total + self.same(hidden)
        logits: Tensor = self.head(total)
        return logits


def test_the_graph_of_a_long_loop_is_searched_once(tmp_path: Path) -> None:
    begin = time.process_time()
    train(tmp_path, Repeated())
    assert (
        time.process_time() - begin < 20
    )  # half a minute for each pass if each output is compared with all functions


def layer_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules() if module is not model)


@pytest.mark.skipif(
    not internals.reads_graphs(),
    reason="this PyTorch does not show which saved tensors are packed: hooks stay",
)
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
