from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep_rules.builtin.tensors.similar_across_runs import (
    SimilarAcrossRuns,
    SimilarAcrossRunsParams,
    SimilarAcrossRunsState,
)
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.reference import reference_of

LOSS = tensor("loss", "losses", shape=())
WEIGHT = tensor("a.weight", "weights")


def run(values: list[float], every: int = 1) -> Block:
    return block_of([Row(every * step, LOSS, [value]) for step, value in enumerate(values)])


def found(block: Block, reference: dict[str, Any], **params: Any) -> list[int]:
    config = RuleConfig(rule="similar_across_runs", params={"reference": reference, **params})
    return [finding.step for finding in all_at_once(config, block).findings]


def test_the_same_run_is_similar_and_another_is_not() -> None:
    reference = reference_of(run([4.0, 2.0, 1.0]))
    assert found(run([4.0, 2.0, 1.0]), reference) == []
    assert found(run([4.0, 2.9, 1.6]), reference) == [2]


def test_outside_its_steps_nothing_is_judged() -> None:
    assert found(run([9.0, 1.0, 1.0, 9.0]), {"loss": [(1, 1.0), (2, 1.0)]}) == []


def test_other_tensors_and_modes_are_not_judged() -> None:
    block = block_of([Row(0, WEIGHT, [9.0]), Row(0, LOSS, [9.0], "eval")])
    assert found(block, {"loss": [(0, 1.0)]}) == []


def test_without_a_reference_nothing_is_reported() -> None:
    assert found(run([9.0]), {}) == []


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
    assert found(block_of(rows), reference, figure="mean", tolerance=0.0, atol=0.0) == []
    assert found(run([loss + 1e10 for loss in losses]), reference, figure="mean", tolerance=1e-9) != []


def test_steps_that_the_other_run_did_not_measure_are_not_judged() -> None:
    reference: dict[str, Any] = {"loss": [(0, 0.0), (2, 1.0), (4, 0.0)]}
    assert found(run([0.0, 9.0, 1.0, 9.0, 0.0]), reference, figure="mean", tolerance=0.0) == []
    assert found(run([0.0, 0.0, 1.1, 0.0, 0.1]), reference, figure="mean", tolerance=0.0) == [2, 4]


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
        reference_of(run([1.0]), "median")
    with pytest.raises(RuleError, match="points=1"):
        reference_of(run([1.0]), points=1)
    wrong: list[dict[str, Any]] = [
        {"figure": "median"},
        {"reference": {"loss": [(1, 1.0), (1, 2.0)]}},
        {"reference": {"loss": []}},
    ]
    for params in wrong:
        with pytest.raises(ValidationError):
            RuleConfig(rule="similar_across_runs", params=params)


def test_the_tensors_statistics_may_be_any_recorded_or_derived_figure() -> None:
    assert reference_of(run([2.0]), "square_sum") == {"loss": [(0, 4.0)]}
    assert np.isfinite(reference_of(run([2.0]), "abs_mean")["loss"][0][1])
