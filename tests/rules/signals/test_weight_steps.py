"""Steps without findings are processed at once, with the same findings and state as one by one."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.runs import Event, Rows, in_steps, runs
from tests.sdk.format.blocks import Row, tensor
from watchstep.format.block import Block, concatenate
from watchstep_rules.builtin.weights.weight_not_updating import WeightNotUpdating, WeightNotUpdatingParams
from watchstep_rules.rule import Finding, State
from watchstep_rules.signals.series import merge_shards
from watchstep_rules.signals.weight_steps import StepsOfWeights, Weights

RULE = WeightNotUpdating()


def judged(block: Block, params: WeightNotUpdatingParams) -> tuple[State, list[Finding]]:
    return RULE.evaluate(params, RULE.state_type(), Block.empty(), block, 0)


def judged_one_by_one(block: Block, params: WeightNotUpdatingParams) -> tuple[State, list[Finding]]:
    def all_of_them(steps: StepsOfWeights, _: Weights) -> np.ndarray:
        return np.ones(int(steps.numbers[-1]) + 1, np.bool_)

    with patch.object(StepsOfWeights, "_suspicious", all_of_them):
        return judged(block, params)


@given(runs(), st.sampled_from([1e-8, 1e-4, 0.01]), st.sampled_from([1e-6, 1e-2]))
def test_runs_of_any_kind(events: list[Event], threshold: float, ran_down: float) -> None:
    block = merge_shards(concatenate([event.block for event in events if isinstance(event, Rows)]))
    params = WeightNotUpdatingParams(threshold=threshold, ran_down=ran_down)
    assert judged(block, params) == judged_one_by_one(block, params)


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_with_a_few_bad_steps(seed: int) -> None:
    random = Random(seed)
    rows = []
    for step in range(60):
        rows.append(Row(step, tensor("loss", "losses", shape=()), [2.0 * 0.97**step]))
        for layer in range(3):
            name = f"layers.{layer}.weight"
            rows.append(Row(step, tensor(f"layers.{layer}:output", "activations", order=layer), [1.0, 0.5]))
            if random.random() < 0.9:
                gradient = [0.0] if random.random() < 0.05 else [random.gauss(0, 1), 0.5]
                rows.append(Row(step, tensor(f"{name}:gradient", "gradients", order=layer), gradient))
            ratio = 0.0 if random.random() < 0.03 else random.uniform(1e-4, 1e-2)
            update = tensor(f"{name}:update", "updates", order=layer)
            rows.append(Row(step, update, [ratio, 0.0], probes={"update_ratio": ratio}))
    block, params = in_steps(rows), WeightNotUpdatingParams()
    assert judged(block, params) == judged_one_by_one(block, params)
