"""Losses with and without recording are bitwise equal."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.sdk.training import (
    EVERY_STEP,
    Composed,
    Training,
    batches,
    small_model,
    watched_training,
    watching,
)
from watchstep import Bounds, Cadence, CaptureConfig, Collection, Hook, Snapshots, open_run
from watchstep.capture.config import FIGURES_ONLY

STEPS = 25


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def recorded(training: Training, store: Path, **options: object) -> list[float]:
    with Hook(store, **{"config": EVERY_STEP, **options}) as hook:  # type: ignore[arg-type]
        hook.watch(training.model, training.optimizer)
        losses = training.run(STEPS, lambda _, loss: hook.log(loss=loss))
    assert hook.health["faults"] == {}
    return losses


def everything_saved() -> CaptureConfig:
    """All collections in full at every step."""
    names = set(CaptureConfig().collections) - FIGURES_ONLY | {"optimizer_state"}
    collections = {name: Collection(tensors=Cadence()) for name in names}
    return CaptureConfig(
        collections={**collections, "mine": Collection(None, include=".*", tensors=Cadence())}
    )


@pytest.mark.parametrize(
    "config",
    [
        EVERY_STEP,
        CaptureConfig(),
        everything_saved(),
        replace(everything_saved(), snapshots=Snapshots(memory_bytes=2000)),
    ],
    ids=["every step", "within the budget", "everything saved", "everything saved and no memory"],
)
def test_eager(tmp_path: Path, config: CaptureConfig) -> None:
    assert recorded(Training(), tmp_path, config=config) == Training().run(STEPS)
    if config == everything_saved():
        assert len({key.step for key in open_run(next(tmp_path.glob("default/*"))).snapshots()}) == STEPS


class Encoder(nn.Module):
    """A layer of PyTorch's that takes a faster path in evaluation unless a module in it has a hook, and then computes other numbers with a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.embed(x[:, None].expand(-1, 6, -1) * torch.arange(1.0, 7.0)[None, :, None])
        mask = torch.triu(torch.full((6, 6), -1.5), 1)
        output: Tensor = self.head(self.layer(sequence, src_mask=mask).mean(1))
        return output


@pytest.mark.parametrize("config", [EVERY_STEP, CaptureConfig()], ids=["every step", "within the budget"])
def test_evaluations_are_unchanged_between_steps(tmp_path: Path, config: CaptureConfig) -> None:
    def evaluated(store: Path | None) -> list[Tensor]:
        training, outputs = Training(Encoder()), []
        x, _ = batches(1, seed=5)[0]

        def evaluate(_step: int, _loss: Tensor) -> None:
            for model in (training.model, copy.deepcopy(training.model)):
                model.eval()
                with torch.no_grad():
                    outputs.append(model(x))
            training.model.train()

        hook = None if store is None else watching(store, training.model, training.optimizer, config=config)
        training.run(8, evaluate)
        if hook is not None:
            hook.close()
            run = open_run(hook.run_url)
            assert "layer.linear1:output" in run.tensors()
        return outputs

    for watched, plain in zip(evaluated(tmp_path), evaluated(None), strict=True):
        assert torch.equal(watched, plain)


class Teaching(Encoder):
    """Evaluates itself within its training pass, or a part that shares its attributes, as a replica of `nn.DataParallel` does. Is interrupted once."""

    interrupted, by_replica = -1, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self.interrupted -= 1
        if self.interrupted == 0:
            super().forward(x)
            raise KeyboardInterrupt
        own = self.layer
        if self.by_replica:
            self.layer = copy.copy(own)
            self.layer.__dict__ = {**own.__dict__, "_modules": {**own._modules, "norm2": nn.LayerNorm(16)}}
        self.eval()
        with torch.no_grad():
            target = super().forward(x)
        self.train()
        self.layer = own
        return super().forward(x) + 0.1 * target


@pytest.fixture
def nothing_compiled() -> None:
    """Forget what other tests have compiled: layers that code compiled elsewhere may call are left alone."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.counters.clear()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("by_replica", [False, True])
@pytest.mark.parametrize("config", [EVERY_STEP, CaptureConfig()], ids=["every step", "within the budget"])
def test_evaluations_within_a_training_pass_are_unchanged(
    tmp_path: Path, config: CaptureConfig, by_replica: bool
) -> None:
    def training() -> Training:
        model = Teaching()
        model.by_replica = by_replica
        return Training(model)

    assert recorded(training(), tmp_path, config=config) == training().run(STEPS)
    assert "layer.linear1:output" in open_run(next(tmp_path.glob("default/*"))).tensors()


class OwnState(nn.TransformerEncoderLayer):
    """A layer whose copies have all of its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class OwnCopy(nn.TransformerEncoderLayer):
    """The same, by another usual way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class Copying(nn.Module):
    """Makes another layer of its encoder layer in each pass."""

    def __init__(self, kind: type[nn.Module], change: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = kind(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 2)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 1, -1)
        with torch.no_grad():
            target = self.change(self.layer)(x)
        output: Tensor = self.out((self.layer(x) + 0.1 * target)[:, 0])
        return output


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (OwnState, copy.deepcopy),
        (OwnCopy, copy.deepcopy),
        (OwnState, lambda layer: pickle.loads(pickle.dumps(layer))),
        (nn.TransformerEncoderLayer, torch.jit.script),
    ],
    ids=["deepcopy by state", "own deepcopy", "pickle", "script"],
)
def test_copies_of_encoder_layers_within_a_training_pass_are_unchanged(
    tmp_path: Path, kind: type[nn.Module], change: Callable[[nn.Module], Any]
) -> None:
    def training() -> Training:
        return Training(Copying(kind, change))

    assert recorded(training(), tmp_path, config=EVERY_STEP) == training().run(STEPS)


@pytest.mark.ci
@pytest.mark.parametrize("config", [EVERY_STEP, CaptureConfig()], ids=["every step", "within the budget"])
def test_encoder_layers_that_are_compiled_outside_of_the_model_are_compiled_once(
    tmp_path: Path, config: CaptureConfig
) -> None:
    def graphs(store: Path | None) -> int:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Composed(lambda own, x: own.out(own.fast[0](x[:, None])[:, 0]), out=nn.Linear(8, 2))
        model.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model.layer.register_forward_hook(lambda _module, _inputs, output: output * 1.0)
        model.__dict__["fast"] = [torch.compile(model.layer, backend="eager", fullgraph=True)]
        training = Training(model)
        hook = None if store is None else watching(store, model, training.optimizer, config=config)
        training.run(20)
        if hook is not None:
            hook.close()
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    assert graphs(tmp_path) == graphs(None) == 1


def test_evaluations_after_an_interrupted_training_pass_are_unchanged(tmp_path: Path) -> None:
    x, _ = batches(1, seed=5)[0]

    def evaluated(store: Path | None) -> list[Tensor]:
        model = Teaching()
        model.interrupted = 3
        training = Training(model)
        hook = None if store is None else watching(store, model, training.optimizer)
        with pytest.raises(KeyboardInterrupt):
            training.run(8)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded: nn.Module = torch.load(saved, weights_only=False)
        outputs = []
        with torch.no_grad():
            for each in (copy.deepcopy(model), loaded, model.eval()):
                each.eval()
                mask = torch.triu(torch.full((6, 6), -1.5), 1)
                outputs += [each.layer(torch.linspace(0, 1, 96).reshape(1, 6, 16), mask), each(x)]  # type: ignore[operator]
        if hook is not None:
            hook.close()
        return outputs

    for watched, plain in zip(evaluated(tmp_path), evaluated(None), strict=True):
        assert torch.equal(watched, plain)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
def test_parts_that_are_compiled_after_an_eager_pass_are_compiled_once(tmp_path: Path) -> None:
    def graphs(store: Path | None) -> tuple[int, list[float]]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        block = Composed(lambda own, x: torch.relu(own.inner(x)), inner=nn.Linear(16, 16))
        model = nn.Sequential(nn.Linear(8, 16), block, nn.Linear(16, 2))
        training = Training(model)
        hook = None if store is None else watching(store, model, training.optimizer, config=CaptureConfig())
        with torch.no_grad():
            model(batches(1)[0][0])
        model[1].compile(backend="aot_eager", dynamic=False)
        losses = training.run(STEPS)
        if hook is not None:
            hook.close()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], losses

    number, losses = graphs(tmp_path)
    assert (number, losses) == graphs(None)
    assert number


def test_dropout_draws_the_same_numbers(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(small_model(), nn.Dropout(0.5), nn.Linear(2, 2))

    assert recorded(Training(model()), tmp_path) == Training(model()).run(STEPS)


def test_a_store_path_that_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    hook, training = watched_training(
        tmp_path / "file" / "store", config=CaptureConfig(bounds=Bounds(close_seconds=0.5))
    )
    assert training.run(STEPS) == Training().run(STEPS)
    hook.close()
    assert "cannot create the folder" in hook.health["faults"]["store"]
    assert hook.health["counts"]["unwritten_objects"] > 0


def compiled_losses(backend: str, store: Path | None, *, watch_first: bool = False) -> list[float]:
    """Losses of a compiled training; recorded where a store is given."""
    torch.compiler.reset()
    inner = small_model()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    hook = Hook(store, config=EVERY_STEP) if store is not None else None
    if hook and watch_first:
        hook.watch(inner, optimizer)
    compiled: nn.Module = torch.compile(inner, backend=backend)  # type: ignore[assignment]
    training = Training(compiled, optimizer)
    if hook and not watch_first:
        hook.watch(training.model, optimizer)
    losses = training.run(STEPS, (lambda _, loss: hook.log(loss=loss)) if hook else None)
    if hook:
        hook.close()
        assert hook.health["faults"] == {}
        assert hook.health["counts"]["rows"] > STEPS
        assert "not observed" in hook.health["notes"]["activations"]
    return losses


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.compiler,
            pytest.mark.release,
            pytest.mark.skipif(
                shutil.which("g++") is None, reason="torch.compile's inductor needs a C++ compiler"
            ),
        ],
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_weights_gradients_and_loss(backend: str, tmp_path: Path) -> None:
    plain = compiled_losses(backend, None)
    assert compiled_losses(backend, tmp_path / "after") == plain
    assert compiled_losses(backend, tmp_path / "before", watch_first=True) == plain


class Checkpointed(nn.Module):
    """Computes the outputs of its first layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[:3], x, use_reentrant=False)
        return torch.as_tensor(self.layers[3](hidden))


@pytest.mark.parametrize("model", [small_model, Checkpointed])
def test_a_compiled_model_is_one_graph_and_its_steps_are_recorded(
    tmp_path: Path, model: Callable[[], nn.Module]
) -> None:
    """Also in steps in which the hooks of layers come and go: compiled code has none."""
    import torch._dynamo.testing

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    counter = torch._dynamo.testing.CompileCounter()
    steps = 12
    with watching(tmp_path, watched, optimizer, run="r") as hook:
        compiled = torch.compile(watched, backend=counter)
        for x, y in batches(steps):
            nn.functional.cross_entropy(compiled(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not hook.health["faults"]
    run = open_run(tmp_path / "default" / "r")
    assert run.tensor("loss").rows.step.tolist() == list(range(steps))
    assert all(run.tensors(role=role) for role in ("weight", "gradient", "update"))


def compiled_step_losses(hook: Hook | None) -> list[float]:
    """Losses of a training whose optimizer's step is compiled."""
    torch.compiler.reset()
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if hook is not None:
        hook.watch(model, optimizer)
    step = torch.compile(optimizer.step, backend="aot_eager")
    losses = []
    for x, y in batches(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


@pytest.mark.ci
def test_a_compiled_optimizer_step(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    losses = compiled_step_losses(hook)
    hook.close()
    assert hook.health["faults"] == {}
    assert losses == compiled_step_losses(None)
