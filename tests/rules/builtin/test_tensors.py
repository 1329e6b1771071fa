"""Rules over single tensors and over differences from other runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.runs import all_at_once, first_message, found_by
from tests.sdk.format.blocks import Row, Values, block_of, gradient, tensor
from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep.format.tensors import Mode, Placement, TensorInfo
from watchstep_rules.builtin.tensors.similar_across_runs import (
    SimilarAcrossRuns,
    SimilarAcrossRunsParams,
    SimilarAcrossRunsState,
)
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.reference import reference_of

# all_zero


ALL_ZERO_OUTPUT = tensor("first:output", "activations")


def all_zero(rows: list[Row], **params: object) -> list[int]:
    return found_by("all_zero")(block_of(rows), **params)


@pytest.mark.parametrize(
    "info", [ALL_ZERO_OUTPUT, gradient("a"), tensor("a.weight", "weights"), tensor("x:input", "inputs")]
)
@pytest.mark.parametrize(("values", "steps"), [([0.0, 0.0, -0.0], [3]), ([0.0, 0.0, 1e-30], []), ([], [])])
def test_every_element_must_be_zero(info: TensorInfo, values: Values, steps: list[int]) -> None:
    assert all_zero([Row(3, info, values)]) == steps


def test_a_share_can_be_requested() -> None:
    rows = [Row(0, ALL_ZERO_OUTPUT, [0.0, 0.0, 0.0, 1.0]), Row(1, ALL_ZERO_OUTPUT, [0.0, 0.0, 1.0, 1.0])]
    assert all_zero(rows, share=0.75) == [0]


def test_nan_is_no_zero() -> None:
    assert all_zero([Row(0, ALL_ZERO_OUTPUT, [0.0, float("nan")])]) == []


def test_of_shards_the_whole_tensor_is_judged() -> None:
    halves = [
        Row(0, gradient("a"), values, worker=at, place=Placement(at, 2))
        for at, values in enumerate(([0.0], [1.0]))
    ]
    assert all_zero(halves) == []


def test_the_message_states_how_many() -> None:
    assert first_message("all_zero", block_of([Row(0, ALL_ZERO_OUTPUT, [0.0] * 4)])) == (
        "100.0% of the 4 elements of first:output are zero, the limit is 100.0%"
    )


# tensor_variance


TENSOR_VARIANCE_OUTPUT = tensor("a:output", "activations")


def reported(values: Values, **params: float) -> list[tuple[float, float]]:
    config = RuleConfig(rule="tensor_variance", params=params)
    findings = all_at_once(config, block_of([Row(0, TENSOR_VARIANCE_OUTPUT, values)])).findings
    return [(finding.value, finding.threshold) for finding in findings]


@pytest.mark.parametrize(
    ("values", "found"), [([-3.0, 3.0], [(9.0, 8.9)]), ([-1.0, 1.0], []), ([-0.1, 0.1], [(0.01, 0.5)])]
)
def test_above_one_bound_and_below_the_other(values: Values, found: list[tuple[float, float]]) -> None:
    seen = reported(values, max_threshold=8.9, min_threshold=0.5)
    assert np.allclose(np.reshape(seen, (-1, 2)), np.reshape(found, (-1, 2)))
    assert len(seen) == len(found)


def test_a_bound_that_is_not_given_is_not_tested() -> None:
    assert (
        reported([-3.0, 3.0])
        == reported([-3.0, 3.0], min_threshold=0.5)
        == reported([0.0, 0.0], max_threshold=1.0)
        == []
    )


def test_a_single_element_has_no_variance() -> None:
    assert reported([5.0], min_threshold=0.5) == []
    assert reported([5.0, float("nan")], min_threshold=0.5) == []


# unchanged_tensor


WEIGHT = tensor("a.weight", "weights")
CHECKSUM = tensor("a.weight:checksum", "checksums", shape=())
NAN = float("nan")


def unchanged(
    records: Sequence[Values], info: TensorInfo = WEIGHT, mode: Mode = "train", **params: object
) -> list[int]:
    rows = [Row(10 * number, info, values, mode) for number, values in enumerate(records)]
    return found_by("unchanged_tensor")(block_of(rows), **params)


def test_three_records_that_are_the_same_are_found_and_two_are_not() -> None:
    same, other = [1.0, -2.0], [1.0, -2.5]
    assert unchanged([same, same]) == []
    assert unchanged([same, same, same, other, same, same, same]) == [20, 60]
    assert unchanged([same, same], num_steps=2) == [10]


@pytest.mark.parametrize(("change", "steps"), [(0.9e-5, [20]), (3e-5, [])])
def test_the_tolerance_is_that_of_allclose(change: float, steps: list[int]) -> None:
    assert unchanged([[1.0, 1.0], [1.0, 1.0], [1.0 + change, 1.0 + change]]) == steps


def test_what_changes_by_little_each_time_is_compared_with_the_oldest() -> None:
    assert unchanged([[1.0], [1.0 + 0.9e-5], [1.0 + 1.8e-5]]) == []


def test_signs_that_change_are_a_change() -> None:
    assert unchanged([[1.0, -1.0], [1.0, -1.0], [-1.0, -1.0]]) == []


def test_nan_is_like_nothing_unless_requested() -> None:
    assert unchanged([[1.0, NAN]] * 3) == []
    assert unchanged([[1.0, NAN]] * 3, equal_nan=True) == [20]


def test_checksums_are_the_same_only_bit_for_bit() -> None:
    assert unchanged([[2.0**52]] * 3, CHECKSUM) == [20]
    assert unchanged([[2.0**52], [2.0**52], [2.0**52 + 1]], CHECKSUM) == []


def test_validation_sees_the_same_examples_each_time() -> None:
    info = tensor("model:input", "inputs")
    assert unchanged([[1.0, 2.0]] * 3, info, "eval") == []
    assert unchanged([[1.0, 2.0]] * 3, info) == [20]


def test_tensors_without_elements_never_change() -> None:
    assert unchanged([[]] * 5) == []


# unlike_earlier_runs


LOSS = tensor("loss", "losses", shape=())
GRADIENT = gradient("layer")
BASELINE = {
    "runs": ["a", "b", "c"],
    "tensors": {
        "loss": {"shape": [], "statistic": "mean", "phases": [[1.0, 3.0], [0.5, 2.0], None]},
        GRADIENT.name: {"shape": list(GRADIENT.shape), "statistic": "rms", "phases": [[0.1, 1.0]] * 3},
    },
}


def unlike(block: Block, **params: Any) -> list[tuple[int, str]]:
    config = RuleConfig(rule="unlike_earlier_runs", params=params)
    return [(finding.step, finding.message) for finding in all_at_once(config, block).findings]


def loss_run(*values: float, mode: Any = "train") -> Block:
    return block_of([Row(step, LOSS, [value], mode) for step, value in enumerate(values)])


def test_without_a_baseline_nothing_is_found() -> None:
    assert unlike(loss_run(1e9, -1e9)) == []


def test_a_value_outside_the_range_of_its_phase_is_found() -> None:
    assert unlike(loss_run(2.0, 2.0, 2.5), baseline=BASELINE) == [
        (2, "mean of loss is 2.5, above the range 0.5 to 2 of 3 earlier runs in this phase")
    ]
    assert unlike(block_of([Row(0, GRADIENT, [0.01])]), baseline=BASELINE) == [
        (0, f"rms of {GRADIENT.name} is 0.01, below the range 0.1 to 1 of 3 earlier runs in this phase")
    ]


def test_a_lower_loss_is_no_deviation() -> None:
    assert unlike(loss_run(0.9), baseline=BASELINE) == []


def test_phases_without_a_range_and_steps_beyond_the_baseline_are_not_judged() -> None:
    assert unlike(loss_run(2.0, 1.0, 1.0, *[1e6] * 30), baseline=BASELINE) == []


def test_evaluation_passes_are_not_judged() -> None:
    assert unlike(loss_run(9.0, mode="eval"), baseline=BASELINE) == []


def test_gradients_are_compared_by_their_rms() -> None:
    block = block_of([Row(0, GRADIENT, [-30.0, 40.0])])
    (found,) = unlike(block, baseline=BASELINE)
    assert found[1].startswith(f"rms of {GRADIENT.name} is 35.36, above the range 0.1 to 1")


def test_values_near_zero_are_not_compared() -> None:
    tiny = {"tensors": {"loss": {"shape": [], "statistic": "mean", "phases": [[1e-20, 1e-19]]}}}
    assert unlike(loss_run(1e-15), baseline=tiny) == []
    assert len(unlike(loss_run(1e-15), baseline=tiny, min_magnitude=0.0)) == 1


def test_what_is_left_of_a_tensor_at_the_end_of_a_schedule_is_not_compared() -> None:
    update = tensor("layer.weight:update", "updates", role="update")
    phases = [[1e-3, 1e-2], [0.0, 0.0]]
    baseline = {"tensors": {update.name: {"shape": [8, 8], "statistic": "rms", "phases": phases}}}
    assert unlike(block_of([Row(1, update, [5e-9])]), baseline=baseline) == []
    assert len(unlike(block_of([Row(1, update, [5e-7])]), baseline=baseline)) == 1


def test_the_rms_of_a_few_elements_is_not_compared() -> None:
    few = gradient("layer", shape=(3, 5))
    baseline = {"tensors": {few.name: {"shape": [3, 5], "statistic": "rms", "phases": [[0.1, 1.0]]}}}
    assert unlike(block_of([Row(0, few, [40.0])]), baseline=baseline) == []


# similar_across_runs


def loss_records(values: list[float], every: int = 1) -> Block:
    return block_of([Row(every * step, LOSS, [value]) for step, value in enumerate(values)])


def dissimilar(block: Block, reference: dict[str, Any], **params: Any) -> list[int]:
    config = RuleConfig(rule="similar_across_runs", params={"reference": reference, **params})
    return [finding.step for finding in all_at_once(config, block).findings]


def test_the_same_run_is_similar_and_another_is_not() -> None:
    reference = reference_of(loss_records([4.0, 2.0, 1.0]))
    assert dissimilar(loss_records([4.0, 2.0, 1.0]), reference) == []
    assert dissimilar(loss_records([4.0, 2.9, 1.6]), reference) == [2]


def test_outside_its_steps_nothing_is_judged() -> None:
    assert dissimilar(loss_records([9.0, 1.0, 1.0, 9.0]), {"loss": [(1, 1.0), (2, 1.0)]}) == []


def test_other_tensors_and_modes_are_not_judged() -> None:
    block = block_of([Row(0, WEIGHT, [9.0]), Row(0, LOSS, [9.0], "eval")])
    assert dissimilar(block, {"loss": [(0, 1.0)]}) == []


def test_without_a_reference_nothing_is_reported() -> None:
    assert dissimilar(loss_records([9.0]), {}) == []


def test_a_reference_holds_few_points_of_the_lowest_worker_and_is_ready_for_json() -> None:
    rows = [
        Row(step, LOSS, [float(step + 10 * worker)], worker=worker) for step in range(50) for worker in (0, 1)
    ]
    (points,) = reference_of(block_of(rows), "mean", points=5).values()
    assert points == [(0, 0.0), (12, 12.0), (24, 24.0), (36, 36.0), (49, 49.0)]
    assert [type(number) for number in points[1]] == [int, float]


@given(
    losses=st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=60),
    points=st.integers(2, 8),
    measured=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
)
def test_a_run_that_is_equal_never_fires_whichever_steps_were_measured(
    losses: list[float], points: int, measured: tuple[int, int, int]
) -> None:
    of_other, of_run, offset = measured
    rows = [Row(step, LOSS, [losses[step]]) for step in range(0, len(losses), of_other)]
    reference = reference_of(block_of(rows), "mean", points=points)
    rows = [Row(step, LOSS, [losses[step]]) for step in range(offset, len(losses), of_run)]
    assert dissimilar(block_of(rows), reference, figure="mean", tolerance=0.0, atol=0.0) == []
    assert (
        dissimilar(loss_records([loss + 1e10 for loss in losses]), reference, figure="mean", tolerance=1e-9)
        != []
    )


def test_steps_that_the_other_run_did_not_measure_are_not_judged() -> None:
    reference: dict[str, Any] = {"loss": [(0, 0.0), (2, 1.0), (4, 0.0)]}
    assert dissimilar(loss_records([0.0, 9.0, 1.0, 9.0, 0.0]), reference, figure="mean", tolerance=0.0) == []
    assert dissimilar(loss_records([0.0, 0.0, 1.1, 0.0, 0.1]), reference, figure="mean", tolerance=0.0) == [
        2,
        4,
    ]


def test_that_no_step_was_shared_is_reported_and_no_row_is_conclusive() -> None:
    rule = SimilarAcrossRuns()
    params = SimilarAcrossRunsParams.model_validate(
        {"reference": {"loss": [(1, 0.0), (3, 0.0)]}, "figure": "mean"}
    )
    block = block_of([Row(step, LOSS, [0.0]) for step in range(0, 2000, 2)])
    state, findings = rule.evaluate(params, SimilarAcrossRunsState(), Block.empty(), block, 4)
    assert findings == []
    assert rule.problem(state).startswith(
        "no statistic could be compared: the other run did not measure loss at step 0;"
    )
    assert not rule.conclusive(params, block).any()
    shared = block_of([Row(3, LOSS, [0.0])])
    state, _ = rule.evaluate(params, state, Block.empty(), shared, 4)
    assert rule.problem(state) == ""
    assert rule.conclusive(params, shared).all()


def test_a_reference_is_of_the_tensors_that_are_requested() -> None:
    block = block_of([Row(0, LOSS, [1.0]), Row(0, WEIGHT, [3.0, 4.0]), Row(1, WEIGHT, [float("nan")])])
    assert reference_of(block, "l2", include=r"a\.") == {"a.weight": [(0, 5.0)]}


def test_what_cannot_be_a_reference_states_why() -> None:
    infos = [tensor(f"{number}.weight", "weights") for number in range(501)]
    with pytest.raises(RuleError, match="501 tensors are too many"):
        reference_of(block_of([Row(0, info, [1.0]) for info in infos]))
    with pytest.raises(RuleError, match="'median' is not known"):
        reference_of(loss_records([1.0]), "median")
    with pytest.raises(RuleError, match="points=1"):
        reference_of(loss_records([1.0]), points=1)
    wrong: list[dict[str, Any]] = [
        {"figure": "median"},
        {"reference": {"loss": [(1, 1.0), (1, 2.0)]}},
        {"reference": {"loss": []}},
    ]
    for params in wrong:
        with pytest.raises(ValidationError):
            RuleConfig(rule="similar_across_runs", params=params)


def test_the_tensors_statistics_may_be_any_recorded_or_derived_figure() -> None:
    assert reference_of(loss_records([2.0]), "square_sum") == {"loss": [(0, 4.0)]}
    assert np.isfinite(reference_of(loss_records([2.0]), "abs_mean")["loss"][0][1])
