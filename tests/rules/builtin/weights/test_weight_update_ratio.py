from __future__ import annotations

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig

UPDATE = tensor("a.weight:update", "updates")
OF_BIAS = tensor("a.bias:update", "updates", shape=(8,))
NAN = float("nan")


@pytest.mark.parametrize(
    ("ratio", "limits"), [(10.1, [10.0]), (10.0, []), (1e-3, []), (1e-8, []), (0.9e-8, [1e-8]), (NAN, [])]
)
def test_far_too_large_or_small_is_found(ratio: float, limits: list[float]) -> None:
    outcome = all_at_once(
        RuleConfig(rule="weight_update_ratio"),
        block_of([Row(0, UPDATE, [1.0], probes={"update_ratio": ratio})]),
    )
    assert [finding.threshold for finding in outcome.findings] == limits


def test_vectors_are_judged_only_if_requested() -> None:
    block = block_of([Row(0, OF_BIAS, [1.0], probes={"update_ratio": 99.0})])
    for least, number in ((2, 0), (1, 1)):
        config = RuleConfig(rule="weight_update_ratio", params={"min_dimensions": least})
        assert len(all_at_once(config, block).findings) == number


def test_without_the_probe_nothing_is_reported() -> None:
    assert (
        all_at_once(RuleConfig(rule="weight_update_ratio"), block_of([Row(0, UPDATE, [1.0])])).findings == []
    )
