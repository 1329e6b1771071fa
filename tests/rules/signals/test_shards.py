from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, blocks, gradient, rows_of, statistics_of
from watchstep.format.block import Block
from watchstep.format.tensors import Placement
from watchstep_rules.signals.series import merge_shards

A, B = gradient("a"), gradient("b")


def shard(step: int, worker: int, values: list[float], *, of: int = 2, replica: int = 0) -> Row:
    return Row(step, A, values, worker=worker, place=Placement(worker % of, of, replica))


def test_shards_of_one_step_become_one_row() -> None:
    merged = merge_shards(block_of([shard(1, 1, [3.0]), shard(1, 0, [1.0, 2.0]), shard(2, 0, [5.0])]))
    assert merged.step.tolist() == [1, 2]
    assert merged.worker.tolist() == [0, 0]
    assert merged.statistics.count.tolist() == [3, 1]
    assert merged.statistics.max.tolist() == [3.0, 5.0]
    assert merged.time_ns.tolist() == [1_000_001, 2_000_000]
    assert merged.places.shard_count.tolist() == [1, 1]
    assert merged.places.shard_index.tolist() == [0, 0]


def test_what_one_shard_reports_of_a_parameter_in_no_optimizer_is_true_of_the_parameter() -> None:
    rows = [shard(1, 0, [1.0]), shard(1, 1, [1.0]), shard(2, 0, [1.0]), shard(2, 1, [1.0])]
    changed = [0.0, 1.0, 0.0, 0.0]
    probes = [{"changed": share, "optimized_share": 0.5, "update_ratio": 1.0} for share in changed]
    merged = merge_shards(
        block_of([replace(row, probes=row_probes) for row, row_probes in zip(rows, probes, strict=True)])
    )
    assert {name: values.tolist() for name, values in merged.probes.items()} == {
        "changed": [1.0, 0.0],
        "optimized_share": [0.5, 0.5],
    }


def test_replicas_and_stages_and_modes_stay_apart() -> None:
    rows = [shard(1, worker, [1.0], replica=worker // 2) for worker in range(4)]
    rows.append(Row(1, A, [1.0], worker=0, place=Placement(0, 2, 0, "reduced")))
    rows.append(Row(1, A, [1.0], mode="eval", worker=0, place=Placement(0, 2)))
    merged = merge_shards(block_of(rows))
    assert merged.statistics.count.tolist() == [2, 1, 1, 2]
    assert merged.worker.tolist() == [0, 0, 0, 1]


def test_whole_tensors_of_several_workers_stay_apart_beside_shards() -> None:
    rows = [Row(1, B, [1.0], worker=worker, probes={"dead": 0.5}) for worker in (0, 1)]
    block = block_of([*rows, shard(1, 0, [1.0]), shard(1, 1, [1.0])])
    merged = merge_shards(block)
    whole = merged.where(merged.mask_of_tensors([info == B for info in merged.catalogue]))
    assert whole.worker.tolist() == [0, 1]
    assert whole.probes["dead"].tolist() == [0.5, 0.5]
    assert len(merged) == 3
    assert np.isnan(merged.probes["dead"]).sum() == 1


def test_a_block_without_shards_only_takes_the_canonical_order() -> None:
    block = block_of([Row(2, A, [1.0]), Row(1, B, [2.0]), Row(1, A, [3.0])])
    assert rows_of(merge_shards(block)) == rows_of(block.ordered())
    assert merge_shards(block).step.tolist() == [1, 1, 2]
    assert len(merge_shards(Block.empty())) == 0


def unique(block: Block) -> Block:
    """Without rows sent twice; each worker holds one shard of a tensor."""
    key = np.stack([block.step, block.mode, block.worker, block.tensor])
    return block.take(np.sort(np.unique(key, axis=1, return_index=True)[1]))


@given(blocks, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(block: Block, random: object) -> None:
    block = unique(block)
    order = list(range(len(block)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = block.take(np.array(order, np.intp))
    assert rows_of(merge_shards(shuffled)) == rows_of(merge_shards(block))


@given(blocks)
def test_nothing_is_lost(block: Block) -> None:
    merged = merge_shards(block)
    for name in ("count", "nan", "zero"):
        assert getattr(merged.statistics, name).sum() == getattr(block.statistics, name).sum()
    assert merged.statistics.histogram.counts.sum() == block.statistics.histogram.counts.sum()
    assert rows_of(merge_shards(merged)) == rows_of(merged)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=4), min_size=1, max_size=4))
def test_a_merged_row_is_that_of_the_whole(parts: list[list[float]]) -> None:
    rows = [shard(0, worker, values, of=max(2, len(parts))) for worker, values in enumerate(parts)]
    merged = merge_shards(block_of(rows)).statistics
    whole = statistics_of([[value for part in parts for value in part]])
    assert (
        rows_of(replace(block_of([Row(0, A, [])]), statistics=merged))[0][7]
        == rows_of(replace(block_of([Row(0, A, [])]), statistics=whole))[0][7]
    )
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.m2, whole.m2, rtol=1e-9, atol=1e-6)
