"""Series of rows: their order, what stood before, shards as one row, values made once for a catalogue, and steps of weights."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.runs import Event, Rows, in_steps, runs
from tests.sdk.format.blocks import INFOS, Row, block_of, blocks, gradient, rows_of, statistics_of, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import Placement, TensorInfo
from watchstep_rules.builtin.weights.weight_not_updating import WeightNotUpdating, WeightNotUpdatingParams
from watchstep_rules.rule import Finding, State
from watchstep_rules.signals.series import LaggedRows, SeriesRows, merge_shards
from watchstep_rules.signals.tensor_selection import CatalogueCache
from watchstep_rules.signals.weight_steps import StepsOfWeights, Weights

# Series


def plain_names(block: Block) -> list[str]:
    return [f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}" for row in range(len(block))]


@given(blocks)
def test_rows_of_a_series_are_adjacent_and_in_order(block: Block) -> None:
    rows, names = SeriesRows.of(block, by_mode=True), plain_names(block)
    assert sorted(rows.names) == sorted(set(names))
    assert [rows.names[number] for number in rows.series] == names
    for name, places in zip(rows.names, rows.rows(), strict=True):
        assert places.tolist() == [place for place, other in enumerate(names) if other == name]


@given(blocks)
def test_preceding_rows_are_of_the_same_series(block: Block) -> None:
    rows, names = SeriesRows.of(block, by_mode=True), plain_names(block)
    values = np.arange(len(block), dtype=np.int64)
    before = rows.before(values, -1)
    for row, name in enumerate(names):
        earlier = [place for place in range(row) if names[place] == name]
        assert before[row] == (earlier[-1] if earlier else -1)
    last = {name: place for place, name in enumerate(names)}
    assert dict(zip(rows.names, rows.last(values), strict=True)) == last


def test_modes_are_distinguished_only_if_requested() -> None:
    block = block_of([Row(0, gradient("a"), [1.0]), Row(1, gradient("a"), [1.0], mode="eval")])
    assert SeriesRows.of(block).names == ["a.weight:gradient@0"]
    assert SeriesRows.of(block, by_mode=True).names == [
        "a.weight:gradient@0/train",
        "a.weight:gradient@0/eval",
    ]


# Rows that stood before


FIRST, SECOND, THIRD = (tensor(name, "weights") for name in "abc")


def test_what_stood_before_is_of_the_same_series_and_of_the_context_too() -> None:
    context = block_of(
        [Row(0, THIRD, [9.0]), Row(0, SECOND, [1.0]), Row(1, SECOND, [2.0]), Row(1, SECOND, [7.0], "eval")]
    )
    block = block_of(
        [Row(2, FIRST, [3.0]), Row(2, SECOND, [4.0]), Row(3, SECOND, [5.0]), Row(3, SECOND, [8.0], worker=1)]
    )
    lagged = LaggedRows.of(context, block)
    means = lagged.column(lambda rows: rows.statistics.mean)
    nan = np.nan
    for rows, expected in enumerate(
        [[3.0, 4.0, 5.0, 8.0], [nan, 2.0, 4.0, nan], [nan, 1.0, 2.0, nan], [nan, nan, 1.0, nan]]
    ):
        assert np.array_equal(lagged.lag(means, rows), np.array(expected), equal_nan=True)


def test_nothing_before_nothing() -> None:
    lagged = LaggedRows.of(Block.empty(), Block.empty())
    assert len(lagged.lag(lagged.column(lambda rows: rows.statistics.mean), 1)) == 0


# Shards


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


# Values made once for a catalogue


@dataclass(frozen=True)
class Followed(TensorInfo):
    """A tensor's description whose end can be seen."""


def catalogue(name: str) -> tuple[TensorInfo, ...]:
    described = vars(replace(INFOS[0], name=name))
    return (Followed(**described),)


def test_a_value_is_made_once_for_a_catalogue_and_a_key() -> None:
    values: CatalogueCache[object] = CatalogueCache()
    first, second = catalogue("a"), catalogue("a")
    entry = values.get(first, "key", object)
    assert values.get(first, "key", object) is entry
    assert values.get(first, "other", object) is not entry
    assert values.get(second, "key", object) is not entry


@pytest.mark.ci
def test_catalogues_stay_up_to_a_total_size() -> None:
    size = sum(info.memory for info in catalogue("n" * 1000))
    values: CatalogueCache[object] = CatalogueCache(most_bytes=3 * size)
    given = [catalogue("n" * 999 + str(number)) for number in range(5)]
    ends = [weakref.ref(entry[0]) for entry in given]
    for entry in given:
        values.get(entry, "key", object)
    del entry
    given.clear()
    gc.collect()
    assert [end() is not None for end in ends] == [False, False, True, True, True]


@pytest.mark.ci
def test_a_catalogue_of_more_than_half_the_room_does_not_stay() -> None:
    values: CatalogueCache[object] = CatalogueCache(most_bytes=10_000)
    large = catalogue("n" * 8000)
    end = weakref.ref(large[0])
    assert values.get(large, "key", object) is not values.get(large, "key", object)
    del large
    gc.collect()
    assert end() is None


# Steps without findings are processed at once, with the same findings and state as one by one.


RULE = WeightNotUpdating()


def judged_at_once(block: Block, params: WeightNotUpdatingParams) -> tuple[State, list[Finding]]:
    return RULE.evaluate(params, RULE.state_type(), Block.empty(), block, 0)


def judged_one_by_one(block: Block, params: WeightNotUpdatingParams) -> tuple[State, list[Finding]]:
    def all_of_them(steps: StepsOfWeights, _: Weights) -> np.ndarray:
        return np.ones(int(steps.numbers[-1]) + 1, np.bool_)

    with patch.object(StepsOfWeights, "_suspicious", all_of_them):
        return judged_at_once(block, params)


@given(runs(), st.sampled_from([1e-8, 1e-4, 0.01]), st.sampled_from([1e-6, 1e-2]))
def test_runs_of_any_kind(events: list[Event], threshold: float, ran_down: float) -> None:
    block = merge_shards(concatenate([event.block for event in events if isinstance(event, Rows)]))
    params = WeightNotUpdatingParams(threshold=threshold, ran_down=ran_down)
    assert judged_at_once(block, params) == judged_one_by_one(block, params)


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
    assert judged_at_once(block, params) == judged_one_by_one(block, params)
