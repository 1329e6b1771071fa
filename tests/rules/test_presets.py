"""The preset ``sagemaker``: each rule fires on a textbook case of Amazon's definition, and not just beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rules.losses import classes
from tests.rules.runs import all_at_once
from tests.sdk.blocks import Row, block_of, gradient, tensor
from watchstep import Hook, open_run
from watchstep.block import Block
from watchstep.errors import RuleError
from watchstep_rules.presets import PRESETS
from watchstep_rules.rule_file import parse

SAGEMAKER = {config.name: config for config in PRESETS["sagemaker"]}
LOSS = tensor("loss", "losses", shape=())
LABELS = tensor("labels", "labels", shape=(16,))
RELU = replace(tensor("act:output", "activations", order=1), module_type="ReLU")
TANH = replace(tensor("act:output", "activations", order=1), module_type="Tanh")
FIRST, SECOND = (
    replace(tensor(f"{name}:output", "activations", order=order), module_type="Linear")
    for order, name in enumerate(("first", "second"))
)
IMAGES = tensor("model:input", "inputs", shape=(500, 1, 1, 1))
UPDATE = tensor("norm.weight:update", "updates", shape=(8,))
INF, NAN = float("inf"), float("nan")


def found(name: str, rows: Sequence[Row]) -> list[int]:
    """Steps at which the preset's rule of Amazon's name says something."""
    return sorted({finding.step for finding in all_at_once(SAGEMAKER[name], block_of(rows)).findings})


def losses(*values: float, every: int = 1, evaluations: dict[int, float] | None = None) -> list[Row]:
    rows = [Row(every * place, LOSS, [value]) for place, value in enumerate(values)]
    rows += [Row(step, LOSS, [value], "eval") for step, value in (evaluations or {}).items()]
    return sorted(rows, key=lambda row: row.step)


def channels(dead: float, saturated: float) -> dict[str, float]:
    return {"channels": 10.0, "dead_channels": dead, "saturated_channels": saturated}


def test_vanishing_gradient() -> None:
    assert found("VanishingGradient", [Row(0, gradient("a"), [0.99e-7, -0.99e-7])]) == [0]
    assert found("VanishingGradient", [Row(0, gradient("a"), [1.01e-7, -1.01e-7])]) == []
    # Of all elements, whatever other layers do, and of biases too.
    assert found("VanishingGradient", [Row(0, gradient("a", shape=(8,)), [0.0, 0.0, 0.0, 3e-7])]) == [0]
    assert found("VanishingGradient", [Row(0, gradient("a"), [NAN, 0.0])]) == []


def test_exploding_tensor() -> None:
    assert found("ExplodingTensor", [Row(0, gradient("a"), [1.0, INF])]) == [0]
    assert found("ExplodingTensor", [Row(0, FIRST, [1.0, -INF])]) == [0]
    assert found("ExplodingTensor", [Row(0, gradient("a"), [3e38])]) == []


def test_poor_weight_initialization_by_variances() -> None:
    name = "PoorWeightInitialization"
    for ratio, steps in ((10.1, [0]), (9.9, [])):
        size = ratio**0.5
        assert found(name, [Row(0, FIRST, [-size, size]), Row(0, SECOND, [-1.0, 1.0])]) == steps
    assert found(name, [Row(0, FIRST, [-9.0, 9.0]), Row(0, RELU, [-1.0, 1.0])]) == []


def test_poor_weight_initialization_by_the_range_of_gradients() -> None:
    name = "PoorWeightInitialization"
    assert found(name, [Row(0, gradient("a"), [-4e-4, *[0.0] * 18, 4e-4])]) == [0]
    assert found(name, [Row(0, gradient("a"), [*[-6e-4] * 10, *[6e-4] * 10])]) == []


def test_poor_weight_initialization_by_losses_of_the_first_steps() -> None:
    name = "PoorWeightInitialization"
    assert found(name, losses(1.0, 1.0, 1.1, 1.1, 1.2, 1.2)) == [5]
    assert found(name, losses(1.0, 1.0, 1.1, 1.1, 1.2, 1.19)) == []
    assert found(name, losses(*np.linspace(1, 0.5, 10), *[0.5] * 20)) == []


def test_saturated_activation() -> None:
    seen = losses(1.0)
    assert found("SaturatedActivation", [*seen, Row(0, TANH, [0.5] * 10, probes=channels(0, 6))]) == [0]
    assert found("SaturatedActivation", [*seen, Row(0, TANH, [0.5] * 10, probes=channels(0, 5))]) == []


def test_dead_relu() -> None:
    assert found("DeadRelu", [Row(0, RELU, [0.0] * 10, probes=channels(6, 0))]) == [0]
    assert found("DeadRelu", [Row(0, RELU, [0.0] * 10, probes=channels(5, 0))]) == []


@pytest.mark.parametrize(("ratio", "steps"), [(10.1, [0]), (9.9, []), (1.1e-8, []), (0.9e-8, [0])])
def test_weight_update_ratio(ratio: float, steps: list[int]) -> None:
    assert found("WeightUpdateRatio", [Row(0, UPDATE, [1.0], probes={"update_ratio": ratio})]) == steps
    bias = tensor("norm.bias:update", "updates", shape=(8,))
    assert found("WeightUpdateRatio", [Row(0, bias, [1.0], probes={"update_ratio": ratio})]) == []


def test_all_zero() -> None:
    assert found("AllZero", [Row(0, gradient("a"), [0.0, 0.0])]) == [0]
    assert found("AllZero", [Row(0, gradient("a"), [0.0, 1e-30])]) == []


def test_unchanged_tensor() -> None:
    assert found("UnchangedTensor", losses(0.5, 0.7, 0.7, 0.7)) == [3]
    assert found("UnchangedTensor", losses(0.5, 0.7, 0.7, 0.70002)) == []
    assert (
        found("UnchangedTensor", [Row(step, tensor("a.weight", "weights"), [1.0]) for step in range(5)]) == []
    )


def test_loss_not_decreasing() -> None:
    name = "LossNotDecreasing"
    assert found(name, losses(1.0, 0.9995, 0.999, 0.9985, every=10)) == [10, 20, 30]
    assert found(name, losses(1.0, 0.9985, 0.997, every=10)) == []
    assert found(name, losses(1.0, 1.2, every=10)) == [10]
    # Only every tenth step is held against the one before.
    assert found(name, losses(1.0, *[5.0] * 9, 0.9, *[5.0] * 9, 0.8)) == []
    assert found(name, losses(0.0, 0.0, every=10)) == [10]


def test_overfit() -> None:
    falls = [1.0, 0.8, 0.6]
    assert found("Overfit", losses(*falls, evaluations={0: 1.09, 1: 0.87, 2: 0.67})) == [2]
    assert found("Overfit", losses(*falls, evaluations={0: 1.09, 1: 0.87, 2: 0.65})) == []
    assert found("Overfit", losses(*falls)) == []


def test_overtraining() -> None:
    assert found("Overtraining", losses(1.0, *[0.995] * 5)) == [5]
    assert found("Overtraining", losses(1.0, *[0.995] * 4, 0.98)) == []
    falls = np.linspace(1, 0.1, 12).tolist()
    flat = dict.fromkeys(range(11), 0.7)
    assert found("Overtraining", losses(*falls, evaluations=flat)) == [10]
    assert found("Overtraining", losses(*falls, evaluations={**flat, 10: 0.6})) == []


@pytest.mark.parametrize(
    ("counts", "steps"),
    [((460, 45), [0]), ((450, 50), []), ((45, 4), [])],
    ids=["found", "nine to one", "too few"],
)
def test_class_imbalance(counts: tuple[int, ...], steps: list[int]) -> None:
    assert found("ClassImbalance", [Row(0, LABELS, [0.0, 1.0], probes=classes(counts))]) == steps


def predicted(folder: Path, right: int, wrong: int) -> Block:
    """Ten examples of class 0 that are predicted right, and some of class 1 that are or are not."""
    labels = torch.tensor([0] * 10 + [1] * (right + wrong))
    outputs = torch.tensor([0] * 10 + [1] * right + [2] * wrong)
    with Hook(folder) as hook:
        hook.record(labels=labels, outputs=outputs)
        hook.step()
    return open_run(hook.run_url).rows()


@pytest.mark.parametrize(
    ("name", "right", "wrong", "number"),
    [
        ("ClassImbalance.misprediction", 2, 8, 1),
        ("ClassImbalance.misprediction", 3, 7, 0),
        ("Confusion", 8, 2, 1),
        ("Confusion", 9, 1, 0),
    ],
)
def test_predictions_by_class(tmp_path: Path, name: str, right: int, wrong: int, number: int) -> None:
    said = all_at_once(SAGEMAKER[name], predicted(tmp_path, right, wrong))
    assert [finding.tensor for finding in said.findings] == ["confusion/1"] * number


@pytest.mark.parametrize(("share", "steps"), [(0.51, [0]), (0.5, [])])
def test_nlp_sequence_ratio(share: float, steps: list[int]) -> None:
    assert found("NLPSequenceRatio", [Row(0, FIRST, [0.0], probes={"token_share": share})]) == steps


def test_rules_over_trees() -> None:
    depths = tensor("tree_depth", "custom", role="tree_depth", shape=(2,))
    assert found("TreeDepth", [Row(0, depths, [1.0, 5.0])]) == [0]
    assert found("TreeDepth", [Row(0, depths, [1.0, 4.0])]) == []
    weights = tensor("feature_importance/weight", "custom", role="feature_importance", shape=(4,))
    for share, steps in ((0.81, [0]), (0.8, [])):
        row = Row(0, weights, [1.0, 1.0, 1.0, 1.0], probes={"top_share_3": share})
        assert found("FeatureImportanceOverweight", [row]) == steps


def test_check_input_images() -> None:
    for mean, steps in ((0.21, [0]), (-0.21, [0]), (0.19, [])):
        assert found("CheckInputImages", [Row(0, IMAGES, [mean - 1, mean + 1] * 250)]) == steps
    assert found("CheckInputImages", [Row(0, IMAGES, [3.0] * 499)]) == []


def test_no_rule_of_the_preset_stops_a_job_and_all_have_amazons_names() -> None:
    assert not any(config.stops for config in SAGEMAKER.values())
    assert len(SAGEMAKER) == len(PRESETS["sagemaker"]) == 19
    assert all(name[0].isupper() for name in SAGEMAKER)


def test_a_rule_file_takes_a_preset_and_changes_it() -> None:
    assert parse("preset: sagemaker\n", "mine") == PRESETS["sagemaker"]
    changed = parse(
        "preset: sagemaker\nrules:\n"
        "  - {rule: dead_relu, name: DeadRelu, params: {share: 0.8}}\n"
        "  - {rule: tensor_variance, params: {max_threshold: 10}}\n",
        "mine",
    )
    assert [config.name for config in changed] == [*SAGEMAKER, "tensor_variance"]
    (given,) = (config.params for config in PRESETS["sagemaker"] if config.name == "DeadRelu")
    assert {config.name: config.params for config in changed}["DeadRelu"] == {**given, "share": 0.8}


def test_a_preset_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(RuleError, match="preset: no preset is named 'amazon': use one of sagemaker"):
        parse("preset: amazon\n", "mine")
