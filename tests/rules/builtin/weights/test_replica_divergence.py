from __future__ import annotations

from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.tensors import Placement
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding

FIRST, LAST = (
    tensor(f"{name}.weight:checksum", "checksums", order=order, shape=())
    for order, name in enumerate(("first", "last"))
)


def found(*steps: list[float]) -> list[Finding]:
    """Checksums of the last weight on each worker, while the first one's stay equal."""
    rows = [
        Row(
            100 * step, info, [value if info is LAST else 7.0], worker=worker, place=Placement(replica=worker)
        )
        for step, values in enumerate(steps)
        for worker, value in enumerate(values)
        for info in (FIRST, LAST)
    ]
    return all_at_once(RuleConfig(rule="replica_divergence"), block_of(rows)).findings


def test_equal_replicas_are_fine_and_others_are_found() -> None:
    assert found([5.0, 5.0], [6.0, 6.0]) == []
    (finding,) = found([5.0, 5.0], [6.0, 6.0 + 2**-20])
    assert (finding.step, finding.worker, finding.tensor) == (100, 1, "last.weight:checksum")


def test_the_majority_of_replicas_identifies_the_divergent_one() -> None:
    (finding,) = found([1.0, 5.0, 5.0, 5.0])
    assert finding.worker == 0
    assert finding.message == (
        "last.weight:checksum of worker 0 differs from that of worker 1: of 4 workers 1 have other weights"
    )


def test_two_against_two_the_lowest_rank_is_right() -> None:
    assert [finding.worker for finding in found([1.0, 5.0, 5.0, 1.0])] == [1, 2]


def test_a_single_worker_does_not_diverge() -> None:
    assert found([1.0], [2.0]) == []
