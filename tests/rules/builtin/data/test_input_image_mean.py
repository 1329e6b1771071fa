from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, Values, block_of, tensor
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

IMAGES = tensor("model:input", "inputs", shape=(100, 1, 1, 2))
"""A hundred images of two pixels."""
CENTRED, SHIFTED = [-1.0, 1.0] * 100, [1.5, 3.5] * 100


def found(records: list[Values], info: TensorInfo = IMAGES, **params: Any) -> list[int]:
    rows = [Row(step, info, values) for step, values in enumerate(records)]
    outcome = all_at_once(RuleConfig(rule="input_image_mean", params=params), block_of(rows))
    return [finding.step for finding in outcome.findings]


def test_images_that_are_not_centred_are_found_after_five_hundred() -> None:
    assert found([SHIFTED] * 7) == [4, 5, 6]
    assert found([CENTRED] * 7) == []


def test_the_scale_does_not_matter_unless_a_threshold_does() -> None:
    large = [100 * value for value in CENTRED[:-1]] + [0.0]
    assert found([large] * 5) == []
    assert found([large] * 5, ratio=None, threshold=0.2) == [4]
    assert found([[1e-3 * value for value in SHIFTED]] * 5) == [4]


def test_all_images_so_far_count() -> None:
    minus = [-value for value in SHIFTED]
    assert found([SHIFTED, minus] * 4) == []


@pytest.mark.parametrize(
    "info", [replace(IMAGES, shape=(100, 2)), replace(IMAGES, dtype="uint8"), replace(IMAGES, role="output")]
)
def test_what_is_no_image_is_ignored(info: TensorInfo) -> None:
    assert found([SHIFTED] * 7, info) == []


def test_a_batch_of_another_size_has_as_many_images_as_values() -> None:
    assert found([SHIFTED[:20]] * 49) == []
    assert found([SHIFTED[:20]] * 51) == [49, 50]
