from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, Values, block_of, tensor
from watchstep.format.tensors import Mode, TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

WEIGHT = tensor("a.weight", "weights")
CHECKSUM = tensor("a.weight:checksum", "checksums", shape=())
NAN = float("nan")


def found(
    records: Sequence[Values], info: TensorInfo = WEIGHT, mode: Mode = "train", **params: object
) -> list[int]:
    rows = [Row(10 * number, info, values, mode) for number, values in enumerate(records)]
    outcome = all_at_once(RuleConfig(rule="unchanged_tensor", params=params), block_of(rows))
    return [finding.step for finding in outcome.findings]


def test_three_records_that_are_the_same_are_found_and_two_are_not() -> None:
    same, other = [1.0, -2.0], [1.0, -2.5]
    assert found([same, same]) == []
    assert found([same, same, same, other, same, same, same]) == [20, 60]
    assert found([same, same], num_steps=2) == [10]


@pytest.mark.parametrize(("change", "steps"), [(0.9e-5, [20]), (3e-5, [])])
def test_the_tolerance_is_that_of_allclose(change: float, steps: list[int]) -> None:
    assert found([[1.0, 1.0], [1.0, 1.0], [1.0 + change, 1.0 + change]]) == steps


def test_what_changes_by_little_each_time_is_compared_with_the_oldest() -> None:
    assert found([[1.0], [1.0 + 0.9e-5], [1.0 + 1.8e-5]]) == []


def test_signs_that_change_are_a_change() -> None:
    assert found([[1.0, -1.0], [1.0, -1.0], [-1.0, -1.0]]) == []


def test_nan_is_like_nothing_unless_requested() -> None:
    assert found([[1.0, NAN]] * 3) == []
    assert found([[1.0, NAN]] * 3, equal_nan=True) == [20]


def test_checksums_are_the_same_only_bit_for_bit() -> None:
    assert found([[2.0**52]] * 3, CHECKSUM) == [20]
    assert found([[2.0**52], [2.0**52], [2.0**52 + 1]], CHECKSUM) == []


def test_validation_sees_the_same_examples_each_time() -> None:
    info = tensor("model:input", "inputs")
    assert found([[1.0, 2.0]] * 3, info, "eval") == []
    assert found([[1.0, 2.0]] * 3, info) == [20]


def test_tensors_without_elements_never_change() -> None:
    assert found([[]] * 5) == []
