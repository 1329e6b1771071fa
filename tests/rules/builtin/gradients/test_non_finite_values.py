from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from tests.rules.runs import all_at_once, in_steps, norms
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block, Places
from watchstep.format.statistics import scalars
from watchstep.format.tensors import Placement, TensorInfo
from watchstep_rules.builtin.gradients.non_finite_values import (
    NonFiniteValues,
    NonFiniteValuesParams,
    NonFiniteValuesState,
)
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding

NAN, INF = math.nan, math.inf
OUTPUT = tensor("attention.output", "activations", shape=(8, 8))
LOSS = replace(tensor("loss", "losses", shape=()), derived=True)  # as found at backward()


def found(info: TensorInfo, values: list[float], **params: object) -> list[Finding]:
    checked = NonFiniteValuesParams.model_validate(params)
    outcome = NonFiniteValues().evaluate(
        checked, NonFiniteValuesState(), Block.empty(), block_of([Row(3, info, values)]), 0
    )[1]
    return list(outcome)


@pytest.mark.parametrize("info", [LOSS, OUTPUT, gradient("a"), tensor("w", "weights"), tensor("b", "biases")])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_element_is_enough_wherever_it_is(info: TensorInfo, bad: float) -> None:
    (finding,) = found(info, [1.0, bad, 2.0], allow_infinity_in=())
    assert (finding.tensor, finding.step, finding.value, finding.threshold) == (info.name, 3, 1.0, 0.0)


def test_finite_numbers_are_fine_however_large_or_small() -> None:
    assert found(LOSS, [1.7e308, -1.7e308, 5e-324, 0.0]) == []
    assert found(LOSS, []) == []


def test_masks_are_fine_and_other_infinities_are_not() -> None:
    assert found(OUTPUT, [0.3, -INF, -INF]) == []
    assert len(found(gradient("a"), [0.3, -INF])) == 1
    assert len(found(LOSS, [-INF])) == 1
    assert len(found(OUTPUT, [-INF], allow_infinity_in=())) == 1
    assert found(OUTPUT, [-INF, INF]) == []
    assert len(found(OUTPUT, [-INF, NAN])) == 1


def test_infinities_can_be_left_out_and_some_elements_tolerated() -> None:
    assert found(LOSS, [INF, -INF], only_nan=True) == []
    assert len(found(LOSS, [NAN], only_nan=True)) == 1
    assert found(LOSS, [NAN, INF], max_elements=2) == []
    assert len(found(LOSS, [NAN, INF, INF], max_elements=2)) == 1


def test_the_message_counts_each_kind() -> None:
    (finding,) = found(gradient("conv1"), [NAN, NAN, INF, -INF, 1.0])
    assert finding.message == ("2 NaN, 1 +inf, 1 -inf among 5 elements of conv1.weight:gradient, 0 tolerated")


@pytest.mark.parametrize(
    "params", [{"max_elements": -1}, {"max_elements": "many"}, {"elements": 1}, {"only_nan": 3}]
)
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        NonFiniteValuesParams.model_validate(params)


def test_rows_are_judged_as_they_arrive_and_the_likeliest_cause_is_named() -> None:
    block = block_of(
        [Row(0, LOSS, [1.0]), Row(5, gradient("a"), [NAN]), Row(5, LOSS, [NAN]), Row(5, OUTPUT, [NAN])]
    )
    outcome = all_at_once(RuleConfig(rule="non_finite_values"), block)
    (fired,) = outcome.transitions
    assert (fired.step, fired.phase.value) == (5, "firing")
    assert fired.finding is not None
    assert fired.finding.tensor == OUTPUT.name


@pytest.mark.parametrize(
    ("info", "cause", "advised"),
    [
        (tensor("a:output", "activations"), "The data contain NaN", "Look at model:input"),
        (tensor("a.weight", "weights"), "The learning rate", "Look at the first recorded"),
    ],
)
def test_a_bad_output_points_at_the_batch_and_a_bad_weight_does_not(
    info: TensorInfo, cause: str, advised: str
) -> None:
    (finding,) = found(info, [NAN])
    advice = NonFiniteValues().advice(finding)
    assert advice.usual_causes[0].startswith(cause)
    assert advice.what_to_try[0].startswith(advised)
    assert sorted(advice.usual_causes) == sorted(NonFiniteValues.usual_causes)
    assert sorted(advice.what_to_try) == sorted(NonFiniteValues.what_to_try)


def test_the_state_contains_nothing_of_gradients() -> None:
    outcome = all_at_once(RuleConfig(rule="non_finite_values"), in_steps(norms("a", [1.0, NAN])))
    assert outcome.memory.state == {"finite": [], "metrics": {}}


def test_a_best_loss_may_begin_at_infinity_but_not_return_to_it() -> None:
    info = TensorInfo("best_val_loss", ("losses",), "loss", dtype="float64")
    values = [math.inf, math.inf, 2.0, math.inf, math.nan]
    rows = len(values)
    block = Block(
        step=np.arange(rows),
        mode=np.zeros(rows, np.int8),
        worker=np.zeros(rows, np.int32),
        time_ns=np.arange(rows),
        tensor=np.zeros(rows, np.int32),
        catalogue=(info,),
        places=Places.of([Placement()] * rows),
        statistics=scalars(values),
    )
    rule = NonFiniteValues()
    _, findings = rule.evaluate(NonFiniteValuesParams(), NonFiniteValuesState(), Block.empty(), block, 0)
    assert [finding.step for finding in findings] == [3, 4]


def test_the_mean_over_a_slice_that_is_always_empty_is_no_finding() -> None:
    info = TensorInfo("loss_of_class_10", ("losses",), "loss", dtype="float64")
    rows = [Row(step, info, [NAN], "eval") for step in (9, 19)]
    assert at_once(*rows) == []
    (finding,) = at_once(*rows, Row(29, info, [1.0], "eval"), Row(39, info, [NAN], "eval"))
    assert finding.step == 39


INPUT = tensor("model:input", "inputs", role="input", shape=(4,))
DENSE = tensor("0:output", "activations", role="output")
WEIGHT = tensor("0.weight", "weights", role="weight")


def at_once(*rows: Row, **params: object) -> list[Finding]:
    return all_at_once(RuleConfig(rule="non_finite_values", params=params), block_of(list(rows))).findings


@pytest.mark.parametrize("bad", [DENSE, LOSS, gradient("0")])
@pytest.mark.parametrize(("values", "seen"), [([1.0, NAN], "1 NaN"), ([INF, NAN, INF], "1 NaN, 2 +inf")])
def test_an_input_that_was_bad_is_reported_with_what_follows_from_it(
    bad: TensorInfo, values: list[float], seen: str
) -> None:
    (finding,) = at_once(Row(3, INPUT, values), Row(3, WEIGHT, [1.0]), Row(3, bad, [NAN]))
    assert (finding.tensor, finding.upstream) == (bad.name, (INPUT.name,))
    assert finding.message == (
        f"1 NaN among 1 elements of {bad.name}, 0 tolerated; the input contained {seen} among {len(values)} elements of model:input"
    )
    advice = NonFiniteValues().advice(finding)
    assert advice.usual_causes[0].startswith("The batch of this step was measured as bad")
    assert advice.what_to_try[0].startswith("Find the examples with torch.isfinite")
    assert not any("Look at model:input" in advice_line for advice_line in advice.what_to_try)
    assert len(set(advice.usual_causes)) == len(NonFiniteValues.usual_causes)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([Row(3, INPUT, [1.0]), Row(3, DENSE, [NAN])], ["0:output"]),
        ([Row(3, INPUT, [-INF]), Row(3, DENSE, [NAN])], ["0:output"]),
        ([Row(2, INPUT, [NAN]), Row(3, DENSE, [NAN])], ["0:output"]),
        ([Row(3, INPUT, [NAN], worker=1), Row(3, DENSE, [NAN])], ["0:output"]),
        ([Row(3, INPUT, [NAN], "eval"), Row(3, DENSE, [NAN])], ["0:output"]),
        ([Row(3, INPUT, [NAN]), Row(3, WEIGHT, [NAN]), Row(3, DENSE, [NAN])], ["0.weight", "0:output"]),
        ([Row(3, INPUT, [NAN]), Row(3, DENSE, [1.0])], []),
    ],
)
def test_an_input_is_not_blamed_for_what_it_did_not_cause(rows: list[Row], named: list[str]) -> None:
    findings = at_once(*rows)
    assert [finding.tensor for finding in findings] == named
    assert all(finding.upstream == () and "input contained" not in finding.message for finding in findings)


def test_inputs_are_judged_if_requested() -> None:
    rows = [Row(3, INPUT, [NAN]), Row(3, DENSE, [NAN])]
    given, output = at_once(*rows, judge_inputs=True)
    assert (given.tensor, given.upstream, output.upstream) == (INPUT.name, (), (INPUT.name,))
    only = RuleConfig.model_validate(
        {"rule": "non_finite_values", "tensors": {"collection": "inputs"}, "params": {"judge_inputs": True}}
    )
    assert [finding.tensor for finding in all_at_once(only, block_of(rows)).findings] == [INPUT.name]


def test_inputs_alone_are_no_data() -> None:
    outcome = all_at_once(RuleConfig(rule="non_finite_values"), block_of([Row(3, INPUT, [NAN])]))
    assert (outcome.memory.health.value, outcome.findings) == ("no_data", [])


def test_a_rule_narrowed_to_gradients_reports_it_too() -> None:
    config = RuleConfig.model_validate({"rule": "non_finite_values", "tensors": {"collection": "gradients"}})
    rows = [Row(3, INPUT, [NAN]), Row(3, DENSE, [NAN]), Row(3, gradient("0"), [NAN])]
    (finding,) = all_at_once(config, block_of(rows)).findings
    assert (finding.tensor, finding.upstream) == ("0.weight:gradient", (INPUT.name,))


def test_gradients_of_a_step_that_a_scaler_skips_do_not_count() -> None:
    skipped = TensorInfo("gradient_scaler:skipped", ("metrics",), "metric", dtype="float64")
    rows = block_of(
        [
            Row(0, gradient("a"), [NAN]),
            Row(0, skipped, [1.0]),
            Row(0, LOSS, [1.0]),
            Row(1, gradient("a"), [NAN]),
        ]
    )
    for whole_steps, steps in ((True, [1]), (False, [0, 1])):
        _, findings = NonFiniteValues().evaluate(
            NonFiniteValuesParams(whole_steps=whole_steps),
            NonFiniteValuesState(),
            Block.empty(),
            rows.ordered(),
            0,
        )
        assert [finding.step for finding in findings] == steps
