from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding

LAYERS = [tensor(f"{name}.weight:update", "updates", order=order) for order, name in enumerate("abc")]


def run(*ratios: float, records: int = 6) -> Block:
    return block_of(
        [
            Row(step, info, [1.0], probes={"update_ratio": ratio})
            for step in range(records)
            for info, ratio in zip(LAYERS, ratios, strict=False)
        ]
    )


def found(block: Block) -> list[Finding]:
    return all_at_once(RuleConfig(rule="learning_rate_scale"), block).findings


@pytest.mark.parametrize(
    ("ratios", "tensor_name", "threshold"),
    [
        ((0.5, 0.2, 3.0), "b.weight:update", 0.1),
        ((1e-7, 3e-6, 2e-9), "b.weight:update", 1e-5),
        ((1e-2, 1e-3, 1e-6), "c.weight:update", 1e-5),
    ],
    ids=["all large", "all small", "apart"],
)
def test_rates_far_from_usual_or_from_each_other_are_found(
    ratios: tuple[float, ...], tensor_name: str, threshold: float
) -> None:
    outcome = found(run(*ratios))
    assert [(finding.step, finding.tensor) for finding in outcome] == [(4, tensor_name), (5, tensor_name)]
    assert outcome[0].threshold == pytest.approx(threshold)


@pytest.mark.parametrize(
    "ratios", [(1e-3, 1e-3, 1e-3), (0.5, 0.05, 0.5), (1e-6, 1e-4, 1e-6), (1e-2, 1e-4, 1e-5), (0.0, 0.0, 0.0)]
)
def test_what_is_usual_for_some_layer_is_fine(ratios: tuple[float, ...]) -> None:
    assert found(run(*ratios)) == []


def test_too_few_records_are_inconclusive() -> None:
    assert found(run(0.5, 0.5, 0.5, records=4)) == []


def test_biases_and_embeddings_are_no_layers() -> None:
    block = run(0.5, 0.5, 0.5)
    for change in ({"shape": (8,)}, {"module_type": "Embedding"}):
        catalogue = tuple(replace(info, **change) for info in block.catalogue)
        assert found(replace(block, catalogue=catalogue)) == []
