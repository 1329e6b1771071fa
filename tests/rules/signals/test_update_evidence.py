"""Alerts about non-finite values state whether the update was skipped, from recorded rows alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

NAN = math.nan
LOSS = replace(tensor("loss", "losses", role="loss", shape=()), derived=True)
WEIGHT = tensor("a.weight", "weights", role="weight")
GRADIENT = gradient("a")
CHECK = replace(WEIGHT, name="a.weight:finite_check", role="finite_check", collections=("finite_checks",))


def metric(name: str) -> TensorInfo:
    return tensor(name, "metrics", role="metric", shape=())


SKIPPED, APPLIED, MISSING = (
    metric(name) for name in ("gradient_scaler:skipped", "gradients:nonfinite_applied", "updates:missing")
)
FINITE = ", and the recorded weights are finite"


def message(*rows: Row, bad: TensorInfo = LOSS) -> str:
    """The message of `non_finite_values` about a tensor at step 3, without its counts."""
    findings = all_at_once(
        RuleConfig(rule="non_finite_values"), block_of([Row(3, bad, [NAN]), *rows])
    ).findings
    (finding,) = (finding for finding in findings if finding.tensor == bad.name and finding.worker == 0)
    return finding.message.removeprefix(f"1 NaN among 1 elements of {bad.name}, 0 tolerated")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ""),
        ([Row(3, WEIGHT, [1.0])], ""),
        ([Row(3, SKIPPED, [1.0])], "; the gradient scaler skipped step 3"),
        ([Row(3, SKIPPED, [1.0]), Row(3, WEIGHT, [1.0])], f"; the gradient scaler skipped step 3{FINITE}"),
        (  # one of two optimizers
            [Row(3, SKIPPED, [1.0]), Row(3, GRADIENT, [1.0])],
            "; the gradient scaler skipped an update at step 3",
        ),
        ([Row(3, MISSING, [2.0])], "; no optimizer step was recorded at step 3"),
        ([Row(3, MISSING, [2.0]), Row(3, GRADIENT, [1.0])], ""),
        (
            [Row(3, MISSING, [0.0]), Row(3, GRADIENT, [1.0])],
            "; the update of step 3 was made with finite gradients",
        ),
        ([Row(3, MISSING, [0.0])], ""),  # on a device the gate knows of a gradient too late
        ([Row(3, APPLIED, [1.0]), Row(3, SKIPPED, [1.0])], ""),
        ([Row(2, SKIPPED, [1.0]), Row(3, SKIPPED, [1.0], worker=1)], ""),
    ],
)
def test_a_loss_is_stated_as_harmless_where_that_was_recorded(rows: list[Row], words: str) -> None:
    assert message(*rows) == words


def test_gradients_that_the_optimizer_leaves_out_itself_are_stated_to_be() -> None:
    assert (
        message(Row(3, APPLIED, [0.0]), bad=GRADIENT)
        == "; the optimizer did not apply the gradients of step 3"
    )
    assert message(Row(3, APPLIED, [1.0]), bad=GRADIENT) == ""


def test_weights_are_not_stated_to_be_finite_where_a_finite_check_is_not() -> None:
    rows = block_of([Row(3, CHECK, [NAN]), Row(3, WEIGHT, [1.0]), Row(3, SKIPPED, [1.0])])
    (finding,) = all_at_once(RuleConfig(rule="nan_or_inf"), rows).findings
    assert finding.message == (
        "1 NaN among 1 elements of a.weight after the update, 0 at the start; the gradient scaler skipped step 3"
    )


def test_the_metrics_of_the_recorder_are_evidence_and_those_of_the_program_are_judged() -> None:
    before = [
        Row(step, metric("f1"), [1.0]) for step in range(10)
    ]  # a metric that was never finite is not judged
    rows = block_of(
        [
            *before,
            Row(13, GRADIENT, [NAN]),
            Row(13, LOSS, [NAN]),
            Row(13, metric("f1"), [NAN]),
            Row(13, SKIPPED, [1.0]),
        ]
    )
    for scope, names in (("losses", {"loss"}), ("metrics", {"f1"}), (None, {"loss", "f1", GRADIENT.name})):
        config = RuleConfig.model_validate({"rule": "non_finite_values", "tensors": {"collection": scope}})
        found = all_at_once(config, rows)
        assert {finding.tensor for finding in found.findings} == names
        assert found.memory.evaluated_rows == len(names) + (10 if "f1" in names else 0)
