"""Collections: built-in ones, and those that a user makes by name, module or type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import watchstep
from tests.sdk.training import (
    EVERY_STEP,
    batches,
    recorded,
    small_model,
    watched_training,
    watching,
    with_sgd,
)
from watchstep import Cadence, CaptureConfig, Collection, Hook
from watchstep.errors import ConfigError


def names_in(
    tmp_path: Path, collections: dict[str, Cadence | Collection], steps: int = 2
) -> dict[str, list[str]]:
    """The tensors of each collection after some steps."""
    config = CaptureConfig(collections=collections, overhead_budget=None)
    hook, training = watched_training(tmp_path, config=config)
    training.run(steps)
    return recorded(hook).collections


@pytest.mark.parametrize(
    ("collections", "names"),
    [
        (
            {"head": Collection(include=r"3\.", exclude=r".*bias")},
            {"head": ["3.weight", "3.weight:gradient", "3.weight:update"]},
        ),
        (
            {"norms": Collection(module_types=("LayerNorm",), roles=("weight", "bias"))},
            {"norms": ["2.bias", "2.weight"]},
        ),
        (
            {"all": Collection(module_types=("Module",), roles=("output",))},
            {"all": ["model:output", "0:output", "1:output", "2:output", "3:output"]},
        ),
        (
            {"relu_inputs": Collection(module_types=("ReLU",), roles=("input",))},
            {"relu_inputs": ["1:input"]},
        ),
        (
            {"activations": Collection(module_types=("ReLU",)), "gradients": Collection(exclude="[02]")},
            {"activations": ["1:output"], "gradients": ["3.bias:gradient", "3.weight:gradient"]},
        ),
    ],
    ids=[
        "regular expression",
        "module type",
        "base of a module type",
        "inputs",
        "smaller built-in collections",
    ],
)
def test_collections_by_selectors(
    tmp_path: Path, collections: dict[str, Cadence | Collection], names: dict[str, list[str]]
) -> None:
    assert names_in(tmp_path, collections) == names


def test_a_collection_by_module_takes_what_lies_below_it(tmp_path: Path) -> None:
    model, optimizer = with_sgd(nn.ModuleDict({"encoder": small_model(), "encoder_2": nn.Linear(2, 2)}))
    config = CaptureConfig(collections={"mine": Collection(modules=("encoder",))}, overhead_budget=None)
    with watching(tmp_path, model, optimizer, config=config) as hook:
        model["encoder_2"](model["encoder"](torch.ones(4, 8))).sum().backward()
        optimizer.step()
    collection = recorded(hook).collections["mine"]
    assert "encoder:output" in collection
    assert "encoder.0.weight:gradient" in collection
    assert not any(name.startswith("encoder_2") for name in collection)


def test_a_tensor_is_measured_when_one_of_its_collections_is_due(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={
            "gradients": Cadence(every=4),
            "head": Collection(Cadence(every=3), include="3.weight", roles=("gradient",)),
        }
    )
    hook, training = watched_training(tmp_path, config=config)
    training.run(10)
    run = recorded(hook)
    assert run.tensor("3.weight:gradient").steps() == [0, 3, 4, 6, 8, 9]
    assert run.tensor("0.weight:gradient").steps() == [0, 4, 8]


def test_the_optimizers_state(tmp_path: Path) -> None:
    found = names_in(tmp_path, {"optimizer_state": Cadence()})
    state = found["optimizer_state"]
    assert {"0.weight:exp_avg", "0.weight:exp_avg_sq", "0.weight:update"} <= set(state)
    only = names_in(tmp_path / "2", {"momenta": Collection(roles=("momentum",))})
    assert only == {"momenta": [f"{n}.{p}:exp_avg" for n in ("0", "2", "3") for p in ("bias", "weight")]}


def test_an_update_is_what_changed(tmp_path: Path) -> None:
    model, optimizer = with_sgd(nn.Linear(4, 3), 0.5)
    hook = watching(tmp_path, model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    changed = (model.weight.detach() - before).double()
    rows = recorded(hook).tensor("weight:update").statistics().to_pydict()
    assert rows["square_sum"] == pytest.approx([changed.square().sum().item()], rel=1e-5)
    ratio = changed.square().mean().sqrt() / before.double().square().mean().sqrt()
    assert rows["probe.update_ratio"] == pytest.approx([ratio.item()], rel=1e-5)


def test_tensors_given_by_hand(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={"labels": Cadence(), "custom": Cadence(every=2), "attention": Cadence(every=3)}
    )
    hook, training = watched_training(tmp_path, config=config)

    def give(step: int, _: torch.Tensor) -> None:
        hook.record(labels=torch.full((4,), step), mask=np.ones(3))
        hook.record({"head 0": torch.rand(5)}, collection="attention")
        hook.record(bad=object(), collection="unknown")

    training.run(7, give)
    hook.close()
    run = watchstep.open_run(hook.run_url)
    assert run.tensor("labels").steps() == list(range(7))
    assert run.tensor("labels").info.role == "label"
    assert run.tensor("mask").steps() == [0, 2, 4, 6]
    assert run.tensor("head 0").steps() == [0, 3, 6]
    assert hook.health["counts"]["faults"] == 7


def test_evaluation_in_its_own_mode_and_cadence(tmp_path: Path) -> None:
    config = CaptureConfig(
        collections={"activations": Collection(Cadence(every=2), modes={"eval": Cadence(every=3)})}
    )
    hook, training = watched_training(tmp_path, config=config)
    training.run(3)
    training.model.eval()
    for _ in range(5):
        training.model(torch.ones(7, 8))
    run = recorded(hook)
    assert run.tensor("0:output").steps("train") == [0, 2]
    evaluated = run.tensor("0:output").statistics("eval").to_pydict()
    assert evaluated["count"] == [2 * 7 * 16]  # passes 0 and 3 of 5, merged


def test_a_selector_that_nothing_meets_is_reported(tmp_path: Path) -> None:
    chosen: dict[str, Cadence | Collection] = {
        "relus": Collection(module_types=("Relu",)),
        "head": Collection(include="3"),
        "mine": Cadence(),
    }
    hook, training = watched_training(tmp_path, config=CaptureConfig(collections=chosen))
    training.run(5)
    assert hook.health["notes"]["collections"].startswith("nothing belongs to: relus;")
    hook.close()


def test_labels_that_are_given_before_the_forward_pass_belong_to_it(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    for step, (x, _) in enumerate(batches(5)):
        hook.record(labels=torch.full((8,), step))
        training.optimizer.zero_grad()
        training.model(x).sum().backward()
        training.optimizer.step()
        hook.record(outputs=torch.full((3,), float(step)))
    run = recorded(hook)
    for name, count in (("labels", 8), ("outputs", 3)):
        rows = run.tensor(name).statistics().to_pydict()
        assert rows["step"] == [float(mean) for mean in rows["mean"]] == list(range(5))
        assert rows["count"] == [count] * 5


def test_a_training_that_continues_keeps_the_steps_before_it(tmp_path: Path) -> None:
    for first, steps in ((0, 6), (4, 3)):
        hook, training = watched_training(tmp_path, run="r", first_step=first)
        training.run(steps)
        run = recorded(hook)
    assert run.steps() == list(range(7))
    assert len(run.attempts) == 2
    with pytest.raises(ConfigError, match="first_step"):
        Hook(tmp_path, first_step=-1)


def test_wrong_selectors_and_cadences_are_refused() -> None:
    with pytest.raises(ConfigError, match="tuple"):
        Collection(modules="encoder")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="wieght"):
        Collection(roles=("wieght",))
    with pytest.raises(ConfigError, match=r"1\.5"):
        Cadence(every=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode"):
        Collection(modes={"test": None})  # type: ignore[dict-item]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_recorded_by_its_values(tmp_path: Path, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), 3 * torch.ones(3)], layout=layout)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.log(loss=1.0)
    hook.record({"nested": nested})
    hook.step()
    run = recorded(hook)
    assert run.tensor("nested").statistics().select(["count", "max"]).to_pylist() == [
        {"count": 5, "max": 3.0}
    ]
    assert run.losses().num_rows == 1
