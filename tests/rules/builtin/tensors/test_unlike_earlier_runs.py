from __future__ import annotations

from typing import Any

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", shape=())
GRADIENT = gradient("layer")
BASELINE = {
    "runs": ["a", "b", "c"],
    "tensors": {
        "loss": {"shape": [], "statistic": "mean", "phases": [[1.0, 3.0], [0.5, 2.0], None]},
        GRADIENT.name: {"shape": list(GRADIENT.shape), "statistic": "rms", "phases": [[0.1, 1.0]] * 3},
    },
}


def messages(block: Block, **params: Any) -> list[tuple[int, str]]:
    config = RuleConfig(rule="unlike_earlier_runs", params=params)
    return [(finding.step, finding.message) for finding in all_at_once(config, block).findings]


def losses(*values: float, mode: Any = "train") -> Block:
    return block_of([Row(step, LOSS, [value], mode) for step, value in enumerate(values)])


def test_without_a_baseline_nothing_is_found() -> None:
    assert messages(losses(1e9, -1e9)) == []


def test_a_value_outside_the_range_of_its_phase_is_found() -> None:
    assert messages(losses(2.0, 2.0, 2.5), baseline=BASELINE) == [
        (2, "mean of loss is 2.5, above the range 0.5 to 2 of 3 earlier runs in this phase")
    ]
    assert messages(losses(0.9), baseline=BASELINE) == [
        (0, "mean of loss is 0.9, below the range 1 to 3 of 3 earlier runs in this phase")
    ]


def test_phases_without_a_range_and_steps_beyond_the_baseline_are_not_judged() -> None:
    assert messages(losses(2.0, 1.0, 1.0, *[1e6] * 30), baseline=BASELINE) == []


def test_evaluation_passes_are_not_judged() -> None:
    assert messages(losses(9.0, mode="eval"), baseline=BASELINE) == []


def test_gradients_are_compared_by_their_rms() -> None:
    block = block_of([Row(0, GRADIENT, [-30.0, 40.0])])
    (found,) = messages(block, baseline=BASELINE)
    assert found[1].startswith(f"rms of {GRADIENT.name} is 35.36, above the range 0.1 to 1")


def test_values_near_zero_are_not_compared() -> None:
    tiny = {"tensors": {"loss": {"shape": [], "statistic": "mean", "phases": [[1e-20, 1e-19]]}}}
    assert messages(losses(1e-15), baseline=tiny) == []
    assert len(messages(losses(1e-15), baseline=tiny, min_magnitude=0.0)) == 1


def test_what_is_left_of_a_tensor_at_the_end_of_a_schedule_is_not_compared() -> None:
    update = tensor("layer.weight:update", "updates", role="update")
    phases = [[1e-3, 1e-2], [0.0, 0.0]]
    baseline = {"tensors": {update.name: {"shape": [8, 8], "statistic": "rms", "phases": phases}}}
    assert messages(block_of([Row(1, update, [5e-9])]), baseline=baseline) == []
    assert len(messages(block_of([Row(1, update, [5e-7])]), baseline=baseline)) == 1


def test_the_rms_of_a_few_elements_is_not_compared() -> None:
    few = gradient("layer", shape=(3, 5))
    baseline = {"tensors": {few.name: {"shape": [3, 5], "statistic": "rms", "phases": [[0.1, 1.0]]}}}
    assert messages(block_of([Row(0, few, [40.0])]), baseline=baseline) == []
