"""What alerts about non-finite values state, from recorded rows alone."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding, likelihood

# The first non-finite tensor of a pass in `nan_or_inf` and `non_finite_values`, from recorded rows alone.


NAN, INF = math.nan, math.inf
GIVEN = tensor("model:input", "inputs", role="input")
LOSS = replace(tensor("loss", "losses", shape=()), derived=True)


def output(module: str, order: int = 0) -> TensorInfo:
    return replace(tensor(f"{module}:output", "activations", role="output", order=order), module=module)


def weight(module: str) -> TensorInfo:
    return replace(tensor(f"{module}.weight", "weights"), module=module)


def bad_gradient(step: int = 3, worker: int = 0) -> Row:
    return Row(step, gradient("a"), [NAN], worker=worker)


def executed(rows: list[Row]) -> Block:
    """Rows taken one after the other, shown to the rule in another order."""
    block = block_of(rows)
    times = replace(block, time_ns=np.arange(len(rows), dtype=np.int64))
    order = list(range(len(rows)))
    Random(0).shuffle(order)
    return times.take(np.array(order, np.intp))


def found_at(rows: list[Row], rule: str = "nan_or_inf") -> list[Finding]:
    return all_at_once(RuleConfig(rule=rule), executed(rows)).findings


def origin_and_message(rows: list[Row]) -> tuple[str, str]:
    """The origin and the message of the gradient's finding."""
    (finding,) = [finding for finding in found_at(rows) if finding.role == "gradient"]
    head = "1 NaN among 1 elements of a.weight:gradient, which the optimizer is about to apply"
    assert finding.message.startswith(head)
    return finding.origin, finding.message.removeprefix(head)


UNKNOWN = ", if weights were finite: worker 0 recorded none at this step"


def test_the_first_in_the_order_of_execution_is_named_whatever_the_order_of_modules() -> None:
    rows = [
        Row(3, output("z", order=9), [1.0]),
        Row(3, output("m", order=5), [INF, 2.0]),
        Row(3, output("a", order=1), [NAN]),
        bad_gradient(),
    ]
    assert origin_and_message(rows) == (
        "m:output",
        "; first non-finite output: m:output (Linear), 1 +inf among 2 elements, first NaN: a:output, while z:output was finite",
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], ""),
        (
            [Row(3, GIVEN, [1.0])],
            f", while model:input was finite; it arose between model:input and the end of b{UNKNOWN}",
        ),
        ([Row(3, weight("b"), [1.0])], ", while the weights of b were finite"),
        (
            [Row(3, GIVEN, [1.0]), Row(3, weight("b"), [1.0])],
            (
                ", while model:input and the weights of b were finite"
                "; it arose between model:input and the end of b"
            ),
        ),
        ([Row(3, weight("c"), [-INF])], ""),  # a mask's
        (
            [
                Row(2, GIVEN, [NAN]),
                Row(3, GIVEN, [NAN], "eval"),
                Row(3, GIVEN, [NAN], worker=1),
            ],
            "",
        ),
    ],
)
def test_what_was_finite_before_it_is_reported_where_it_was_recorded(more: list[Row], words: str) -> None:
    origin, message = origin_and_message([*more, Row(3, output("b"), [NAN]), bad_gradient()])
    assert (origin, message) == (
        "b:output",
        f"; first non-finite output: b:output (Linear), 1 NaN among 1 elements{words}",
    )


def test_an_input_with_nan_is_the_origin_unless_outputs_after_it_were_finite() -> None:
    rows = [Row(3, GIVEN, [NAN]), Row(3, output("b"), [NAN]), bad_gradient()]
    assert origin_and_message(rows) == ("", "; the input contained 1 NaN among 1 elements of model:input")
    origin, message = origin_and_message([rows[0], Row(3, output("gaps"), [0.0]), *rows[1:]])
    assert origin == "b:output"
    assert "; the input contained 1 NaN" in message
    assert message.endswith(
        f"while gaps:output was finite; it arose between gaps:output and the end of b{UNKNOWN}"
    )


@pytest.mark.parametrize("module", ["b", "b.inner", "c"])
def test_weights_that_were_bad_before_are_named(module: str) -> None:
    rows = [
        Row(3, weight(module), [NAN, 1.0]),
        Row(3, output("b"), [NAN]),
        bad_gradient(),
    ]
    assert origin_and_message(rows) == (
        "b:output",
        (
            "; first non-finite output: b:output (Linear), 1 NaN among 1 elements"
            f"; weights of {module} were already non-finite: 1 NaN among 2 elements of {module}.weight"
        ),
    )
    assert origin_and_message([rows[0], rows[2]])[1].startswith(
        f"; weights of {module} were already non-finite"
    )


def test_finite_outputs_are_reported_if_any_were_recorded() -> None:
    rows = [Row(3, output("b"), [1.0]), Row(3, output("a"), [2.0]), bad_gradient()]
    assert origin_and_message(rows) == (
        "",
        "; all 2 recorded outputs of worker 0 were finite, the last of them a:output",
    )
    assert origin_and_message([bad_gradient()]) == ("", "")


def test_an_origin_between_the_last_output_and_the_loss_is_reported() -> None:
    all_finite = "; the only recorded output of worker 0, b:output, was finite"
    between = f"{all_finite}; it arose between b:output and loss"
    logged = replace(LOSS, derived=False)
    for info, value, words in (
        (LOSS, NAN, between),
        (LOSS, INF, between),
        (LOSS, 1.0, all_finite),
        (logged, NAN, between),
        (logged, INF, all_finite),  # a best loss
    ):
        assert origin_and_message([Row(3, output("b"), [1.0]), Row(3, info, [value]), bad_gradient()]) == (
            "",
            words,
        )


def test_the_modules_are_named_between_which_a_function_made_a_value_non_finite() -> None:
    before, after = Row(3, output("a"), [1.0]), Row(3, output("b"), [NAN])
    fed = replace(tensor("b:input", "activations", role="input"), module="b")
    head = "; first non-finite output: b:output (Linear), 1 NaN among 1 elements"
    assert origin_and_message([before, Row(3, fed, [INF]), after, bad_gradient()])[1] == (
        f"{head}; it arose between a:output and b, whose input was not finite{UNKNOWN}"
    )
    assert origin_and_message([before, Row(3, fed, [1.0]), after, bad_gradient()])[1] == (
        f"{head}, while b:input was finite; it arose in b{UNKNOWN}"
    )
    assert origin_and_message([before, after, bad_gradient()])[1] == (
        f"{head}, while a:output was finite; it arose between a:output and the end of b{UNKNOWN}"
    )
    model = replace(output(""), name="model:output", module_type="Net")
    assert origin_and_message([before, Row(3, model, [NAN]), bad_gradient()])[1].endswith(
        f"while a:output was finite; it arose after a:output, in the model's own forward or in a module that was not recorded{UNKNOWN}"
    )


def test_other_steps_modes_and_workers_have_origins_of_their_own() -> None:
    rows = [
        Row(2, output("b"), [NAN]),
        Row(3, output("c"), [NAN], "eval"),
        Row(3, output("d"), [NAN], worker=1),
        Row(3, output("e"), [NAN]),
        bad_gradient(),
        bad_gradient(worker=1),
    ]
    assert {(finding.worker, finding.origin) for finding in found_at(rows)} == {
        (0, "e:output"),
        (1, "d:output"),
    }


def test_the_alert_of_non_finite_values_names_the_output_that_was_executed_first() -> None:
    rows = [
        Row(3, output("mask", order=7), [-INF]),
        Row(3, output("late", order=5), [NAN]),
        Row(3, output("early", order=1), [NAN]),
        Row(3, LOSS, [NAN]),
    ]
    findings = found_at(rows, "non_finite_values")
    assert min(findings, key=likelihood).tensor == "late:output"
    assert {finding.origin for finding in findings} == {"mask:output"}
    assert all("first NaN: late:output" in finding.message for finding in findings)


# Alerts about non-finite values state whether the update was skipped, from recorded rows alone.


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
        ([Row(3, MISSING, [2.0])], "; no finite update was recorded at step 3"),
        ([Row(3, MISSING, [2.0]), Row(3, GRADIENT, [1.0])], ""),
        (
            [Row(3, MISSING, [2.0]), Row(3, APPLIED, [0.0])],
            "",
        ),  # a worker without gradients; its optimizer stepped
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
