from __future__ import annotations

import numpy as np
import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, Values, block_of, tensor
from watchstep_rules.config.rule_config import RuleConfig

OUTPUT = tensor("a:output", "activations")


def reported(values: Values, **params: float) -> list[tuple[float, float]]:
    config = RuleConfig(rule="tensor_variance", params=params)
    findings = all_at_once(config, block_of([Row(0, OUTPUT, values)])).findings
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
