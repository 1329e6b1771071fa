"""Values that are not finite: the rule by rows, and the default rules over arrays that programs record themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.rules.runs import all_at_once, in_steps, norms
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Hook, StopTraining
from watchstep.format.block import Block, Places
from watchstep.format.statistics import scalars
from watchstep.format.tensors import Placement, TensorInfo
from watchstep_rules import Guard
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.builtin.gradients.non_finite_values import (
    NonFiniteValues,
    NonFiniteValuesParams,
    NonFiniteValuesState,
)
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.engine.alert import Phase
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


# Default rules over arrays that programs record themselves: loops in NumPy, with and without faults.


Fired = dict[str, tuple[int, str]]


def fired(hook: Hook, rules: Sequence[RuleConfig] = DEFAULT_RULES) -> Fired:
    """The step and the message of the first alert of each rule that fires."""
    found: Fired = {}
    for outcome in backtest(recorded(hook).rows(), rules):
        assert not outcome.problem
        for change in outcome.transitions:
            if change.phase is Phase.FIRING and change.finding is not None:
                found.setdefault(outcome.config.name, (change.finding.step, change.finding.message))
    return found


def run(
    folder: Path, steps: int, record: Callable[[Hook, int], None], rules: Sequence[RuleConfig] = DEFAULT_RULES
) -> Fired:
    """The alerts of a program with these steps."""
    hook = Hook(folder, config=EVERY_STEP)
    for step in range(steps):
        record(hook, step)
        hook.step()
    return fired(hook, rules)


def noise(step: int, bad: float | None = None) -> NDArray[np.float64]:
    values = np.random.default_rng(step).normal(size=(8, 4))
    if bad is not None:
        values[0, 0] = bad
    return values


def regression(
    hook: Hook, step_size: float, steps: int = 200, *, skips: bool = False, bad: Sequence[int] = ()
) -> None:
    """A least-squares training in NumPy that records its weights and gradients."""
    generator = np.random.default_rng(0)
    w, b = np.zeros(4), np.zeros(1)
    for step in range(steps):
        x = generator.normal(size=(16, 4))
        y = x @ np.array([1.0, -2.0, 3.0, 0.5]) + 1
        if step in bad:
            x[0, 0] = NAN
        with np.errstate(all="ignore"):
            error = x @ w + b - y
            gradients = {"w:gradient": x.T @ error / 8, "b:gradient": error.sum(keepdims=True) / 8}
            hook.log(loss=np.mean(error**2))
        hook.record({"w": w}, role="weight")
        hook.record({"b": b}, role="bias")
        hook.record(gradients, role="gradient")
        if not skips or np.isfinite(gradients["w:gradient"]).all():
            with np.errstate(all="ignore"):
                w, b = w - step_size * gradients["w:gradient"], b - step_size * gradients["b:gradient"]
        hook.step()


def regressed(folder: Path, step_size: float, **options: Any) -> Fired:
    hook = Hook(folder, config=EVERY_STEP)
    regression(hook, step_size, **options)
    return fired(hook)


def test_a_sound_training_in_numpy_raises_no_alert(tmp_path: Path) -> None:
    assert regressed(tmp_path, 0.1) == {}


def test_an_applied_gradient_that_is_nan_is_damage(tmp_path: Path) -> None:
    step, message = regressed(tmp_path, 0.1, bad=[50])["nan_or_inf"]
    assert step == 51
    assert message in {
        "4 NaN among 4 elements of w, 0 before",
        "1 NaN among 1 elements of b, 0 before",
    }


def test_skipped_batches_are_no_damage(tmp_path: Path) -> None:
    alerts = regressed(tmp_path / "one", 0.1, skips=True, bad=[50])
    assert alerts == {}
    alerts = regressed(tmp_path / "several", 0.1, skips=True, bad=range(50, 60))
    assert "nan_or_inf" not in alerts
    assert alerts["non_finite_values"][0] == 51


def test_gradients_that_stay_nan_are_damage_without_recorded_weights(tmp_path: Path) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.record({"dw": noise(step, NAN if step >= 20 else None)}, role="gradient")

    step, message = run(tmp_path, 100, record)["nan_or_inf"]
    assert step == 69
    assert (
        message
        == "dw was not finite at 50 records in a row, damage from 50 on: 1 NaN among 32 elements of dw"
    )


def test_steps_without_a_finite_loss_count_although_gradients_are_recorded(tmp_path: Path) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.record({"dw": noise(step)}, role="gradient")
        hook.log(loss=NAN if step >= 10 else 1 / (1 + step))

    assert "no loss was finite in 50 training steps" in run(tmp_path, 80, record)["nan_or_inf"][1]


@pytest.mark.ci
def test_a_guard_stops_a_training_in_numpy_that_diverges(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP, guard=Guard())
    with pytest.raises(StopTraining, match="nan_or_inf") as stop:
        regression(hook, 2.0, steps=2000)
    assert stop.value.step < 2000
    assert hook.stopped is not None


@pytest.mark.parametrize("name", ["outputs", "labels", "mine"])
def test_nan_in_a_given_tensor_raises_a_warning(tmp_path: Path, name: str) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.record({name: noise(step, NAN if step >= 20 else None)})

    alerts = run(tmp_path, 30, record)
    assert alerts.keys() == {"non_finite_values"}
    step, message = alerts["non_finite_values"]
    assert step == 21
    assert message.startswith(f"1 NaN among 32 elements of {name}, 0 tolerated")


def test_infinity_in_a_tensor_of_ones_own_counts_unless_it_was_there_from_the_start(tmp_path: Path) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.record(mask=noise(step, -INF), scores=noise(step, INF if step >= 20 else None))

    (alert,) = run(tmp_path, 30, record).values()
    assert alert == (21, "1 +inf among 32 elements of scores, 0 tolerated")


def test_labels_and_outputs_that_no_loss_uses_may_be_nan(tmp_path: Path) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.record(labels=noise(step, NAN), outputs=noise(step, NAN))
        hook.log(loss=1 / (1 + step))

    assert "non_finite_values" not in run(tmp_path, 30, record)


def test_a_metric_that_becomes_nan_raises_a_warning(tmp_path: Path) -> None:
    def record(hook: Hook, step: int) -> None:
        hook.log(accuracy=NAN if step >= 20 else 0.5)

    assert run(tmp_path, 30, record) == {
        "non_finite_values": (21, "1 NaN among 1 elements of accuracy, 0 tolerated")
    }


@pytest.mark.parametrize(
    "value",
    [
        lambda _: NAN,  # a mean over nothing
        lambda step: 0.5 if step % 10 == 0 else NAN,  # an evaluation at every tenth step
        lambda step: 0.5 if step % 10 < 6 else NAN,  # no finished episode in some steps
        lambda step: -INF if step < 5 else 0.5,  # the best value so far
        lambda step: NAN if step == 40 else 0.5,  # once
    ],
)
def test_metrics_that_are_not_always_known_raise_no_warning(
    tmp_path: Path, value: Callable[[int], float]
) -> None:
    assert run(tmp_path, 80, lambda hook, step: hook.log(accuracy=value(step))) == {}


def test_the_output_of_a_watched_model_is_no_given_output(tmp_path: Path) -> None:
    class Padded(nn.Module):
        """A model whose output is NaN where its caller ignores it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return torch.where(y > 100, y, torch.cat([y[:1], torch.full_like(y[1:], NAN)]))

    model = Padded()
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook.mode = "eval"
    for _ in range(10):
        model(torch.ones(3, 4))
        hook.step()
    assert fired(hook) == {}


@pytest.mark.parametrize("collection", ["custom", "biases"])
@pytest.mark.parametrize(
    ("rule", "params", "words"),
    [
        ("all_zero", {}, "are zero"),
        ("tensor_variance", {"min_threshold": 0.1}, "below 0.1"),
        ("unchanged_tensor", {}, "has not changed"),
        ("non_finite_values", {}, "NaN"),
    ],
)
def test_rules_of_tensors_judge_custom_tensors_and_biases(
    tmp_path: Path, collection: str, rule: str, params: dict[str, Any], words: str
) -> None:
    config = RuleConfig(rule=rule, params=params, tensors=TensorScope(collection=collection))
    role = "custom" if collection == "custom" else "bias"

    def record(hook: Hook, step: int) -> None:
        value = np.array([NAN, 1.0]) if rule == "non_finite_values" else np.zeros(4)
        hook.record({"x": value, "other": noise(step)}, role=role)
        hook.record({"w": value}, role="weight")

    hook = Hook(tmp_path, config=EVERY_STEP)
    for step in range(5):
        record(hook, step)
        hook.step()
    (outcome,) = backtest(recorded(hook).rows(), [config])
    names = {change.finding.tensor for change in outcome.transitions if change.finding is not None}
    assert "x" in names
    assert "w" not in names
    assert any(
        words in change.finding.message for change in outcome.transitions if change.finding is not None
    )
