"""The preset ``sagemaker``: each rule fires on a textbook case of Amazon's definition, and not on a near miss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.rules.builtin.losses import classes
from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.errors import RuleError
from watchstep_rules.builtin.sagemaker.parameters import is_matched
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files.presets import AMAZONS_RULES, PRESETS, AmazonsRule
from watchstep_rules.rule_files.rule_file import parse

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
WEIGHT = tensor("norm.weight", "weights", shape=(8,))
EMBEDDED = replace(FIRST, module_type="Embedding")
INF, NAN = float("inf"), float("nan")


def found(name: str, rows: Sequence[Row]) -> list[int]:
    """Steps at which the preset's rule of Amazon's name has a finding."""
    return sorted({finding.step for finding in all_at_once(SAGEMAKER[name], block_of(rows)).findings})


def losses(*values: float, every: int = 1, evaluations: dict[int, float] | None = None) -> list[Row]:
    rows = [Row(every * place, LOSS, [value]) for place, value in enumerate(values)]
    rows += [Row(step, LOSS, [value], "eval") for step, value in (evaluations or {}).items()]
    return sorted(rows, key=lambda row: row.step)


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


@pytest.mark.parametrize(("units", "steps"), [(6.0, [0]), (5.0, [])])
def test_saturated_activation_and_dead_relu(units: float, steps: list[int]) -> None:
    tanh = {"units": 10.0, "saturated_units:Tanh:-9.4999:9.4999:1.0": units}
    assert found("SaturatedActivation", [Row(0, TANH, [0.5] * 10, probes=tanh)]) == steps
    relu = {"units": 10.0, "inactive_units:1.0": units}
    assert found("DeadRelu", [Row(0, RELU, [0.0] * 10, probes=relu)]) == steps


@pytest.mark.parametrize(
    ("ratio", "steps"), [(10.1, [0]), (9.9, []), (1.1e-8, []), (0.9e-8, [0]), (-1.0, [])]
)
def test_weight_update_ratio(ratio: float, steps: list[int]) -> None:
    probes = {"weight_change:0:1e-09": ratio}
    assert found("WeightUpdateRatio", [Row(0, WEIGHT, [1.0], probes=probes)]) == steps
    bias = tensor("norm.bias", "biases", shape=(8,))
    assert found("WeightUpdateRatio", [Row(0, bias, [1.0], probes=probes)]) == []


def test_all_zero() -> None:
    assert found("AllZero", [Row(0, gradient("a"), [0.0, 0.0])]) == [0]
    assert found("AllZero", [Row(0, gradient("a"), [0.0, 1e-30])]) == []


def test_unchanged_tensor() -> None:
    assert found("UnchangedTensor", losses(0.5, 0.7, 0.7, 0.7)) == [3]
    assert found("UnchangedTensor", losses(0.5, 0.7, 0.7, 0.70002)) == []
    assert (
        found("UnchangedTensor", [Row(step, tensor("a.weight", "weights"), [1.0]) for step in range(5)]) == []
    )


@pytest.mark.ci
def test_loss_not_decreasing() -> None:
    name = "LossNotDecreasing"
    assert found(name, losses(1.0, 0.9995, 0.999, 0.9985, every=10)) == [10, 20, 30]
    assert found(name, losses(1.0, 0.9985, 0.997, every=10)) == []
    assert found(name, losses(1.0, 1.2, every=10)) == [10]
    # Only every tenth step is compared with the one before.
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


@pytest.mark.parametrize(("share", "steps"), [(5.1, [0]), (5.0, [])])
def test_nlp_sequence_ratio(share: float, steps: list[int]) -> None:
    probes = {"token_count:0": share, "tokens_counted": 10.0}
    assert found("NLPSequenceRatio", [Row(0, EMBEDDED, [0.0], probes=probes)]) == steps


def test_rules_over_trees() -> None:
    depths = tensor("tree_depth", "custom", role="tree_depth", shape=(2,))
    assert found("TreeDepth", [Row(0, depths, [1.0, 5.0], probes={"largest_node": 17.0})]) == [0]
    assert found("TreeDepth", [Row(0, depths, [1.0, 5.0], probes={"largest_node": 16.0})]) == []
    weights = tensor("feature_importance/weight", "custom", role="feature_importance", shape=(4,))
    for share, steps in ((0.81, [0]), (0.8, [])):
        row = Row(0, weights, [1.0, 1.0, 1.0, 1.0], probes={"top_share_3": share})
        assert found("FeatureImportanceOverweight", [row]) == steps


def test_check_input_images() -> None:
    for mean, steps in ((0.21, [0]), (-0.21, [0]), (0.19, [])):
        rows = [Row(0, IMAGES, [mean - 1, mean + 1] * 250, probes={"channel_sum:1:0": 500 * mean})]
        assert found("CheckInputImages", rows) == steps
    assert found("CheckInputImages", [Row(0, IMAGES, [3.0] * 499, probes={"channel_sum:1:0": 1497.0})]) == []


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        (
            amazons_rule,
            {
                name: field.default
                for name, field in amazons_rule.implementation.params_type.model_fields.items()
            },
        )
        for amazons_rule in AMAZONS_RULES
    ],
    ids=[amazons_rule.name for amazons_rule in AMAZONS_RULES],
)
def test_parameters_are_checked_by_name_and_may_be_text_as_rule_parameters_are(
    rule: AmazonsRule, params: dict[str, Any]
) -> None:
    kind = rule.implementation.params_type
    assert kind.amazon == rule.name
    as_text = {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in params.items()
        if isinstance(value, str | int | float | tuple)
    }
    assert kind.model_validate(as_text) == kind()
    with pytest.raises(ValidationError) as refused:
        RuleConfig(rule=rule.rule, params={"treshold_mean": 1})
    assert "treshold_mean" in str(refused.value)
    if rule.name != "ProfilerReport":
        assert f"{rule.name} has no parameter 'treshold_mean'" in str(refused.value)
        with pytest.raises(ValidationError, match="'base_trial' is set by SageMaker"):
            RuleConfig(rule=rule.rule, params={"base_trial": "mine"})


@pytest.mark.parametrize(
    ("rule", "params", "words"),
    [
        (
            "sagemaker_saturated_activation",
            {"threshold_tanh": 9},
            "did you mean threshold_tanh_min or threshold_tanh_max",
        ),
        ("sagemaker_stalled_training", {"stop_training_on_fire": "True"}, "give the rule config 'actions:"),
        (
            "sagemaker_similar_across_runs",
            {"other_trials": ["s3://mine/run"]},
            "the name of a run of the same project",
        ),
        ("sagemaker_confusion", {"labels": "truth"}, "hook.record"),
        ("sagemaker_nlp_sequence_ratio", {"token_values": "1,2,3"}, "2 thresholds for 3 token_values"),
        ("sagemaker_step_outlier", {"mode": "modes.EVAL"}, "only training steps"),
        ("sagemaker_feature_importance_overweight", {"nfeatures": 11}, "up to 10 features"),
        (
            "sagemaker_profiler_report",
            {"CPUBottleneck_treshold": 1},
            "CPUBottleneck has no parameter 'treshold'",
        ),
        (
            "sagemaker_profiler_report",
            {"CPUBottleneck_threshold": 200},
            "CPUBottleneck_threshold\n  Input should be less",
        ),
        ("sagemaker_dead_relu", {"tensor_regex": "(?=a)"}, "lookarounds"),
    ],
)
def test_a_value_that_cannot_be_used_states_what_to_write(
    rule: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        RuleConfig(rule=rule, params=params)


def test_an_amazon_name_as_a_rule_is_refused_with_the_name_used_here() -> None:
    with pytest.raises(RuleError, match="Amazon's rule of this name is sagemaker_saturated_activation"):
        parse("rules: [{rule: SaturatedActivation}]", "mine")


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("act:output", "act_output_0"),
        ("act:output", ".*act_input"),
        ("a.weight:gradient", "gradient/a.weight"),
        ("a.weight", "a.weight"),
    ],
)
def test_tensors_go_by_sagemakers_names_too(name: str, expression: str) -> None:
    info = {"act:output": replace(RELU, module="act"), "a.weight:gradient": gradient("a")}.get(
        name, tensor(name, "weights")
    )
    assert is_matched(info, (expression,))
    assert is_matched(info, (re.escape(name),))
    assert not is_matched(info, ("other",))


def test_no_rule_of_the_preset_stops_a_job_and_all_have_amazons_names() -> None:
    assert not any(config.stops for config in SAGEMAKER.values())
    assert len(SAGEMAKER) == len(PRESETS["sagemaker"]) == 18
    assert all(name[0].isupper() for name in SAGEMAKER)


def test_a_rule_file_takes_a_preset_and_changes_it() -> None:
    assert parse("preset: sagemaker\n", "mine") == PRESETS["sagemaker"]
    changed = parse(
        "preset: sagemaker\nrules:\n"
        "  - {rule: sagemaker_dead_relu, name: DeadRelu, params: {threshold_layer: 80}}\n"
        "  - {rule: tensor_variance, params: {max_threshold: 10}}\n",
        "mine",
    )
    assert [config.name for config in changed] == [*SAGEMAKER, "tensor_variance"]
    assert {config.name: config.params for config in changed}["DeadRelu"] == {"threshold_layer": 80}


def test_a_preset_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(RuleError, match="preset: no preset is named 'amazon': use one of sagemaker"):
        parse("preset: amazon\n", "mine")
