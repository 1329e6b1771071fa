"""PyTorch without one of its private names, and Watchstep without one of its modules: training goes on, and one capability is lost."""

from __future__ import annotations

import ast
import copy
import logging
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import watchstep
from tests.sdk.training import EVERY_STEP
from watchstep import Bundles, Hook, open_run
from watchstep.boosting.recorder import BoostingOptions, HookRecording
from watchstep.pytorch import internals

SDK = Path(watchstep.__file__).parent
STEPS = 3
CONFIG = replace(EVERY_STEP, bundles=Bundles())


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    yield
    internals.look_up()


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(4 * STEPS, 4, generator=generator), torch.arange(4 * STEPS) % 2
    return DataLoader(TensorDataset(inputs, labels), batch_size=4)


def train(hook: Hook | None) -> tuple[list[float], list[float]]:
    """Train with what needs private names: normalization, dropout, a gradient scaler, clipping, a data loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    if hook is not None:
        hook.watch(model, optimizer)
    for inputs, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss / 1).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [value for weight in model.state_dict().values() for value in weight.flatten().tolist()]


PLAIN = train(None)


@pytest.mark.parametrize("place", list(internals.INTERNALS))
def test_a_missing_name_costs_one_capability(tmp_path: Path, place: str) -> None:
    internals.look_up({place})
    hook = Hook(tmp_path, config=CONFIG, trace="1:2", on_nonfinite="skip")
    trained = train(hook)
    hook.bundle()
    hook.close()
    assert trained == PLAIN
    assert place in hook.health["notes"][place]
    assert hook.health["faults"] == {}
    collections = open_run(hook.run_url).collections
    assert {"weights", "gradients", "losses"} <= set(collections)
    assert ("activations" in collections) is (internals.sees_passes())


def test_nothing_is_missing_in_this_version(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=CONFIG, trace="1:2", on_nonfinite="skip")
    assert train(hook) == PLAIN
    hook.close()
    assert not [internal.place for internal in internals.INTERNALS.values() if internal.is_missing]
    assert not set(internals.INTERNALS) & set(hook.health["notes"])
    assert hook.health["faults"] == {}


MODULES = {
    "watchstep.pytorch.watch": "watch Sequential",
    "watchstep.pytorch.loaders.loader_samples": "samples",
    "watchstep.pytorch.bundles.bundler": "bundle",
    "watchstep.trace.online": "trace",
    "watchstep.pytorch.policy.update_policy": "update policy",
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_cannot_be_imported_costs_what_it_records(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    hook = Hook(tmp_path, config=CONFIG, trace="1:2", on_nonfinite="skip")
    with caplog.at_level(logging.WARNING, "watchstep"):
        assert train(hook) == PLAIN
    hook.close()
    assert set(hook.health["faults"]) == {MODULES[module]}
    assert module in hook.health["faults"][MODULES[module]]
    assert [record.message for record in caplog.records if module in record.message] != []
    is_recorded = "weights" in open_run(hook.run_url).collections
    assert is_recorded is (module != "watchstep.pytorch.watch")


class OwnHook(Hook):
    """A hook of a program that adds to it."""

    def __init__(self, store: Path) -> None:
        self.factor = 2.0
        super().__init__(store)

    def log_scaled(self, loss: float) -> float:
        """Log a loss."""
        self.log(loss=self.factor * loss)
        return self.factor


@pytest.mark.parametrize("place", ["watchstep.hook.Writer", "watchstep.hook.Hook._start_background"])
def test_a_hook_that_cannot_start_records_nothing(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no threads")

    monkeypatch.setattr(place, fail)
    hook = OwnHook(tmp_path)
    assert isinstance(hook, OwnHook)
    assert train(hook) == PLAIN
    assert hook.log_scaled(1.0) == 2.0
    hook.step()
    assert copy.deepcopy([hook]) == [hook]
    pickle.loads(pickle.dumps(hook)).log(loss=1.0)
    rounds = HookRecording(hook, "XGBoost", BoostingOptions(training="train"))
    rounds.begin_round()
    rounds.finish_round(list, lambda: None, is_last=True)
    hook.close()
    assert hook.health["faults"] == {"start": "OSError: no threads"}


def private_names(source: str) -> list[str]:
    """Private names of other objects than the module's own, in a module's source."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"self", "cls"}
    }
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    names: list[str] = []
    for node in nodes:
        match node:
            case ast.Attribute(attr=("__func__" | "__code__" | "__closure__" | "__globals__") as name):
                names.append(name)
            case ast.Attribute(value=value, attr=name) if name.startswith("_") and not name.startswith("__"):
                is_own = isinstance(value, ast.Name) and value.id in {"sys", "os", "self", "cls"}
                if name not in own and not is_own:
                    names.append(ast.unparse(node))
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "torch":
                parts = [*module.split("."), *(alias.name for alias in aliases)]
                names += [f"{module}: {part}" for part in parts if part.startswith("_")]
            case ast.Constant(value=str(text)) if text in PRIVATE:
                names.append(text)
            case _:
                pass
    return names


PRIVATE = {place.rpartition(".")[2] for place in internals.INTERNALS if "._" in place}
OF_ITS_OWN = {
    "_replace", "_asdict", "_watches", "_session", "_health", "_identity", "_ending", "_recorder", "_fused_dropout",
}  # fmt: skip
"""Private names of Watchstep and of named tuples."""


def test_private_names_of_pytorch_are_looked_up_in_one_place() -> None:
    files = [SDK / "hook.py", SDK / "seeds.py", SDK / "kernels"]
    files += [
        SDK / folder for folder in ("pytorch", "trace", "replay", "wrapper", "capture/steps", "capture/given")
    ]
    modules = [
        module for file in files for module in (sorted(file.rglob("*.py")) if file.is_dir() else [file])
    ]
    found = {
        str(module.relative_to(SDK)): names
        for module in modules
        if module.name != "internals.py"
        and (
            names := [
                name
                for name in private_names(module.read_text())
                if name.rpartition(".")[2] not in OF_ITS_OWN
            ]
        )
    }
    assert found == {}
