"""Rules over weights, gradients and activations decide as Amazon documents them, on small real trainings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rules.builtin.sagemaker import definitions
from tests.rules.builtin.sagemaker.trials import Classifier, Saved, dense, judged, numbers
from tests.rules.runs import all_at_once
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth

MakeModel = Callable[[], nn.Module]


def with_biases(model: MakeModel, bias: float) -> MakeModel:
    """The first layer's biases all alike."""

    def make() -> nn.Module:
        built = model()
        nn.init.constant_(built.get_parameter("0.bias"), bias)
        return built

    return make


class Functional(nn.Module):
    """An activation that is called as a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], first: float = 1.0, bias: float = 0.0) -> None:
        super().__init__()
        self.first_layer, self.second_layer = nn.Linear(4, 16), nn.Linear(16, 2)
        self.seen = nn.Identity()  # whose input is saved for the definition
        self.function = function
        nn.init.constant_(self.first_layer.bias, bias)
        with torch.no_grad():
            self.first_layer.weight.mul_(first)

    def forward(self, inputs: Tensor) -> Tensor:
        """Two layers."""
        return self.second_layer(self.function(self.seen(self.first_layer(inputs))))  # type: ignore[no-any-return]


@pytest.mark.ci
@pytest.mark.parametrize(("first", "fires"), [(1.0, False), (1e-9, True)])
def test_vanishing_gradient(tmp_path: Path, first: float, fires: bool) -> None:
    model = partial(dense, nn.Tanh(), first=first) if not fires else lambda: scaled_last(first)
    found, saved = judged(tmp_path, "sagemaker_vanishing_gradient", {}, Classifier(model))
    assert found == definitions.vanishing_gradient(saved.matching(":gradient"))
    assert bool(found) is fires


def scaled_last(scale: float) -> nn.Module:
    """The last layer passes next to nothing back."""
    model = dense(nn.Tanh())
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(scale)
    return model


@pytest.mark.parametrize(
    ("poison", "only_nan", "fires"),
    [
        (None, False, False),
        ("nan", False, True),
        ("inf", False, True),
        ("inf", True, False),
        ("nan", True, True),
    ],
)
def test_exploding_tensor(tmp_path: Path, poison: str | None, only_nan: bool, fires: bool) -> None:
    def touch(step: int, model: nn.Module) -> None:
        if step == 7 and poison is not None:  # the last step: what follows from it is not saved
            with torch.no_grad():
                model.get_parameter("1.bias")[0] = float(poison)

    params = {"collection_names": "weights, biases", "only_nan": only_nan}
    found, saved = judged(
        tmp_path, "sagemaker_exploding_tensor", params, Classifier(dense, touch=touch, rate=0.0)
    )
    trial = {name: steps for name, steps in saved.tensors.items() if name.endswith(("weight", "bias"))}
    assert found == definitions.exploding_tensor(trial, only_nan=only_nan)
    assert bool(found) is fires


def test_exploding_tensor_judges_all_tensors_where_none_is_named(tmp_path: Path) -> None:
    train = Classifier(dense, touch=lambda step, model: poisoned(model) if step == 2 else None, steps=3)
    found, _ = judged(tmp_path, "sagemaker_exploding_tensor", {}, train)
    assert {"0.weight", "0:output", "loss", "1.weight:gradient", "model:output"} <= {
        name for _, name in found
    }


def poisoned(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("activation", "first", "bounds", "fires"),
    [
        (nn.Tanh, 1.0, (-9.4999, 9.4999), False),
        (
            nn.Tanh,
            8.0,
            (-9.4999, 9.4999),
            False,
        ),  # inputs of four and more: no slope to speak of, and not saturated
        (nn.Tanh, 5000.0, (-9.4999, 9.4999), True),
        (nn.Tanh, 8.0, (-0.1, 0.1), True),
        (nn.Sigmoid, 1.0, (-23.0, 16.99999), False),
        (nn.Sigmoid, 9000.0, (-23.0, 16.99999), True),
    ],
)
def test_saturated_activation(
    tmp_path: Path, activation: type[nn.Module], first: float, bounds: tuple[float, float], fires: bool
) -> None:
    kind = activation.__name__.lower()
    params = {
        f"threshold_{kind}_min": bounds[0],
        f"threshold_{kind}_max": bounds[1],
        "threshold_inactivity": 5.0,
    }
    train = Classifier(lambda: dense(activation(), first=first), rate=0.0, batch=200)
    found, saved = judged(tmp_path, "sagemaker_saturated_activation", params, train)
    expected = definitions.saturated_activation({"1:output": saved.tensors["1:input"]}, *bounds, 5.0)
    assert found == expected
    assert bool(found) is fires


def test_a_tanh_at_an_input_of_four_is_not_saturated(tmp_path: Path) -> None:
    def model() -> nn.Module:
        built = dense(nn.Tanh(), first=0.0)
        nn.init.constant_(built.get_parameter("0.bias"), 4.0)
        return built

    found, saved = judged(tmp_path, "sagemaker_saturated_activation", {}, Classifier(model, rate=0.0))
    assert found == set()
    assert np.allclose(saved.tensors["1:input"][0], 4.0)
    found, _ = judged(
        tmp_path / "b",
        "sagemaker_saturated_activation",
        {"threshold_tanh_max": 3.9},
        Classifier(model, rate=0.0),
    )
    assert {name for _, name in found} == {"1:output"}


@pytest.mark.parametrize(
    ("bias", "params", "fires"),
    [
        (0.0, {}, False),
        (-9.0, {}, True),
        (-1.5, {"threshold_inactivity": 30.0, "threshold_layer": 40.0}, True),
        (-9.0, {"tensor_regex": ".*other"}, False),
        (-9.0, {"tensor_regex": ["1_output_0"]}, True),
    ],
)
@pytest.mark.parametrize("shape", ["features", "images"])
def test_dead_relu(tmp_path: Path, bias: float, params: dict[str, Any], fires: bool, shape: str) -> None:
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))

    model = with_biases(partial(dense, nn.ReLU()), bias) if shape == "features" else with_biases(images, bias)
    train = Classifier(model, rate=0.0, batch=256)

    def run(hook: Hook, saved: Saved) -> None:
        if shape == "images":
            torch.manual_seed(0)
            built = model()
            optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
            hook.watch(built, optimizer)
            saved.watch(built, optimizer)
            for step in range(4):
                saved.step = step
                built(torch.randn(128, 1, 2, 2)).square().mean().backward()
                optimizer.step()
        else:
            train(hook, saved)

    found, saved = judged(tmp_path, "sagemaker_dead_relu", params, run)
    bounds = {name: value for name, value in params.items() if name != "tensor_regex"}
    expected = definitions.dead_relu({"1:output": saved.tensors["1:output"]}, **bounds)
    assert found == (expected if params.get("tensor_regex") != ".*other" else set())
    assert bool(found) is fires


def test_dead_relu_finds_units_that_are_active_in_half_a_percent_of_the_examples(tmp_path: Path) -> None:
    def model() -> nn.Module:
        built = dense(nn.ReLU(), first=0.0)
        nn.init.constant_(built.get_parameter("0.bias"), -1.0)
        with torch.no_grad():
            built.get_parameter("0.weight")[:, 0] = 1.0
        return built

    def train(hook: Hook, saved: Saved) -> None:
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
        hook.watch(built, optimizer)
        saved.watch(built, optimizer)
        for step, active in enumerate((1, 2, 3)):  # of 200 examples
            saved.step = step
            inputs = torch.zeros(200, 4)
            inputs[:active, 0] = 2.0
            built(inputs).square().mean().backward()
            optimizer.step()

    found, saved = judged(tmp_path, "sagemaker_dead_relu", {}, train)
    assert found == definitions.dead_relu({"1:output": saved.tensors["1:output"]}) == {(0, "1:output")}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.relu, "model:relu_0"),
        (nn.functional.relu, "model:relu_0"),
        (lambda x: x.relu(), "model:relu_0"),
        (lambda x: nn.functional.relu(x.clone(), inplace=True), "model:relu_0"),
        (lambda x: x.clone().relu_(), "model:relu_0"),
    ],
    ids=["torch", "functional", "method", "functional in place", "method in place"],
)
@pytest.mark.parametrize(("bias", "fires"), [(0.0, False), (-9.0, True)])
def test_dead_relu_sees_functions(
    tmp_path: Path, function: Callable[[Tensor], Tensor], name: str, bias: float, fires: bool
) -> None:
    train = Classifier(lambda: Functional(function, bias=bias), rate=0.0, steps=3)
    found, saved = judged(tmp_path, "sagemaker_dead_relu", {}, train)
    outputs = {step: np.maximum(value, 0) for step, value in saved.tensors["seen:output"].items()}
    assert found == definitions.dead_relu({name: outputs})
    assert bool(found) is fires


@pytest.mark.parametrize(("first", "fires"), [(1.0, False), (5000.0, True)])
def test_saturated_activation_sees_functions(tmp_path: Path, first: float, fires: bool) -> None:
    params = {"threshold_inactivity": 5.0}
    train = Classifier(lambda: Functional(torch.tanh, first=first), rate=0.0, batch=200, steps=3)
    found, saved = judged(tmp_path, "sagemaker_saturated_activation", params, train)
    inputs = {"model:tanh_0": saved.tensors["seen:output"]}
    assert found == definitions.saturated_activation(inputs, -9.4999, 9.4999, 5.0)
    assert bool(found) is fires


def test_micro_batches_of_a_step_count_as_one_batch(tmp_path: Path) -> None:
    def train(hook: Hook, saved: Saved) -> None:
        model = dense(nn.ReLU(), first=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        hook.watch(model, optimizer)
        for step, alive in enumerate(((1, 0), (0, 0))):  # in which half of the examples units are active
            parts = []
            for half in alive:
                nn.init.constant_(model.get_parameter("0.bias"), 1.0 if half else -1.0)
                inputs = torch.zeros(50, 4)
                parts.append(torch.relu(model[0](inputs)).detach())
                model(inputs).square().mean().backward()
            saved.step = step
            saved.save("1:output", torch.cat(parts))
            optimizer.step()

    found, saved = judged(tmp_path, "sagemaker_dead_relu", {"threshold_inactivity": 60.0}, train)
    assert found == definitions.dead_relu(saved.tensors, 60.0) == {(0, "1:output"), (1, "1:output")}
    found, _ = judged(tmp_path / "b", "sagemaker_dead_relu", {"threshold_inactivity": 40.0}, train)
    assert found == {(1, "1:output")}


@pytest.mark.parametrize(
    ("rate", "params", "fires"),
    [
        (0.1, {}, False),
        (0.0, {}, True),
        (1e4, {}, True),
        (0.1, {"num_steps": 3, "small_threshold": 0.02}, True),
        (0.1, {"num_steps": 3}, False),
        (0.1, {"large_threshold": 0.001, "epsilon": 1.0}, True),
    ],
)
def test_weight_update_ratio(tmp_path: Path, rate: float, params: dict[str, Any], fires: bool) -> None:
    train = Classifier(partial(dense, nn.ReLU()), rate=rate)
    found, saved = judged(tmp_path, "sagemaker_weight_update_ratio", params, train)
    assert found == definitions.weight_update_ratio(saved.matching(".weight"), **params)
    assert bool(found) is fires


def test_weight_update_ratio_looks_back_over_steps_that_were_not_saved(tmp_path: Path) -> None:
    sparse = CaptureConfig(overhead_budget=None, collections={"weights": every(3), "losses": every(1)})
    params = {"num_steps": 7, "small_threshold": 0.05}
    found, saved = judged(
        tmp_path, "sagemaker_weight_update_ratio", params, Classifier(dense, steps=14), config=sparse
    )
    trial = {
        name: {step: value for step, value in steps.items() if step % 3 == 0}
        for name, steps in saved.matching(".weight").items()
    }
    assert found == definitions.weight_update_ratio(trial, num_steps=7, small_threshold=0.05)
    assert found


def every(steps: int) -> Any:
    from watchstep import Cadence

    return Cadence(every=steps)


@pytest.mark.parametrize(
    ("model", "params", "fires"),
    [
        (partial(dense, nn.ReLU()), {}, False),
        (with_biases(partial(dense, nn.ReLU()), -9.0), {}, True),
        (partial(dense, nn.ReLU()), {"threshold": 30.0}, True),
        (with_biases(partial(dense, nn.ReLU()), -9.0), {"collection_names": "weights"}, False),
        (with_biases(partial(dense, nn.ReLU()), -9.0), {"tensor_regex": "gradient/0.*"}, True),
    ],
)
def test_all_zero(tmp_path: Path, model: MakeModel, params: dict[str, Any], fires: bool) -> None:
    found, saved = judged(tmp_path, "sagemaker_all_zero", params, Classifier(model, rate=0.0))
    trial = {name: steps for name, steps in saved.tensors.items() if is_judged(name, params)}
    assert found == definitions.all_zero(trial, params.get("threshold", 100))
    assert bool(found) is fires


def is_judged(name: str, params: dict[str, Any]) -> bool:
    if "collection_names" in params:
        return name.endswith(".weight")
    if "tensor_regex" in params:
        return name.startswith("0.") and name.endswith(":gradient")
    return name.endswith((".weight", ".weight:gradient", ".bias:gradient", ":output"))


@pytest.mark.parametrize(
    ("params", "fires"),
    [
        ({"max_threshold": 10.0, "min_threshold": 1e-9}, False),
        ({"max_threshold": 0.02, "min_threshold": 0.0}, True),
        ({"max_threshold": 10.0, "min_threshold": 0.03}, True),
    ],
)
def test_tensor_variance(tmp_path: Path, params: dict[str, float], fires: bool) -> None:
    given = {"collection_names": ["weights", "gradients"], **params}
    found, saved = judged(tmp_path, "sagemaker_tensor_variance", given, Classifier(partial(dense, nn.ReLU())))
    trial = {name: steps for name, steps in saved.tensors.items() if name.endswith((".weight", ":gradient"))}
    assert found == definitions.tensor_variance(trial, **params)
    assert bool(found) is fires


def rewritten(step: int, model: nn.Module, change: float) -> None:
    """The first layer's weights move by so much from step to step, and mostly cancel out in every sum."""
    with torch.no_grad():
        weight = model.get_parameter("0.weight")
        sign = torch.ones_like(weight)
        sign[::2] = -1
        weight.add_(sign * change * (1 if step % 2 else -1))


@pytest.mark.parametrize(
    ("change", "params", "fires"),
    [
        (0.0, {}, True),
        (1e-9, {}, True),
        (3e-4, {}, False),
        (3e-4, {"atol": 1e-3}, True),
        (3e-4, {"atol": 1e-3, "num_steps": 9}, False),
        (0.0, {"num_steps": 2, "equal_nan": True}, True),
    ],
)
def test_unchanged_tensor(tmp_path: Path, change: float, params: dict[str, Any], fires: bool) -> None:
    train = Classifier(dense, rate=0.0, touch=partial(rewritten, change=change))
    found, saved = judged(
        tmp_path, "sagemaker_unchanged_tensor", {"tensor_regex": "0.weight$", **params}, train
    )
    assert found == definitions.unchanged_tensor({"0.weight": saved.tensors["0.weight"]}, **params)
    assert bool(found) is fires


@pytest.mark.parametrize("collection", ["weights", "biases", "gradients", "activations"])
@pytest.mark.parametrize("same", [True, False])
def test_unchanged_tensor_of_each_collection(tmp_path: Path, collection: str, same: bool) -> None:
    def train(hook: Hook, saved: Saved) -> None:
        torch.manual_seed(0)
        model = dense(nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if same else 0.1)
        hook.watch(model, optimizer)
        saved.watch(model, optimizer)
        inputs = torch.randn(16, 4)
        for step in range(6):
            saved.step = step
            optimizer.zero_grad()
            model(inputs if same else torch.randn(16, 4)).square().mean().backward()
            optimizer.step()

    found, saved = judged(tmp_path, "sagemaker_unchanged_tensor", {"collection_names": collection}, train)
    ending = {"weights": ".weight", "biases": ".bias", "gradients": ":gradient", "activations": ":output"}[
        collection
    ]
    assert found == definitions.unchanged_tensor(saved.matching(ending))
    assert bool(found) is same


def test_a_sum_that_stays_while_elements_move_is_a_change_and_small_moves_that_shift_a_sum_are_none(
    tmp_path: Path,
) -> None:
    def train(hook: Hook, saved: Saved) -> None:
        torch.manual_seed(0)
        model = dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        hook.watch(model, optimizer)
        saved.watch(model, optimizer)
        for step in range(6):
            saved.step = step
            with torch.no_grad():
                model.get_parameter("0.weight").copy_(
                    model.get_parameter("0.weight").flip(0)
                )  # the same elements, elsewhere
                model.get_parameter("1.weight").mul_(1 + 5e-6)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    found, saved = judged(tmp_path, "sagemaker_unchanged_tensor", {"collection_names": "weights"}, train)
    assert found == definitions.unchanged_tensor(saved.matching(".weight"))
    assert {name for _, name in found} == {"1.weight"}


@pytest.mark.parametrize(
    ("model", "params", "by"),
    [
        (lambda: rectified(1.0), {"distribution_range": 1e-9}, ()),
        (lambda: rectified(30.0), {"distribution_range": 1e-9}, range(4)),
        (lambda: rectified(1.0), {}, None),
        (lambda: rectified(1.0), {"distribution_range": 1e-9, "patience": 1, "threshold": 1e6}, None),
        (lambda: rectified(30.0), {"steps": 2, "distribution_range": 1e-9}, range(2)),
    ],
)
def test_poor_weight_initialization(
    tmp_path: Path, model: MakeModel, params: dict[str, Any], by: range | tuple[()] | None
) -> None:
    train = Classifier(model, steps=4, batch=128)
    found, saved = judged(tmp_path, "sagemaker_poor_weight_initialization", params, train)
    losses = [loss for _, loss in sorted(numbers(saved.tensors["loss"]).items())]
    inputs = {name: saved.tensors[name] for name in ("1:input", "3:input")}
    expected = definitions.poor_weight_initialization(inputs, saved.matching(":gradient"), losses, **params)
    assert {step for step, _ in found} == expected
    assert by is None or set(by) == expected


def rectified(last: float) -> nn.Module:
    """Two rectifiers; what goes into the second is so many times larger."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
        model.get_parameter("2.weight").mul_(3 * last)
    return model


@pytest.mark.parametrize(
    "rule", ["sagemaker_dead_relu", "sagemaker_saturated_activation", "sagemaker_weight_update_ratio"]
)
def test_where_the_recorder_did_not_measure_the_rule_states_what_to_do(tmp_path: Path, rule: str) -> None:
    with Hook(tmp_path, config=CaptureConfig(overhead_budget=None)) as hook:
        Classifier(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 2)))(
            hook, Saved()
        )
    outcome = all_at_once(RuleConfig(rule=rule), open_run(hook.run_url).rows())
    assert outcome.memory.health is RuleHealth.ERROR
    assert "Hook(rules=" in outcome.memory.problem
