"""Samplers leave out exactly the samples of a skip list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from watchstep import SkipList
from watchstep.errors import ConfigError


class Numbers:
    """Samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


def _list(*ids: Any) -> SkipList:
    return SkipList("r", (1,), {"Numbers": tuple(ids)})


def _loaded(dataset: Any, **options: Any) -> tuple[list[int], int]:
    """Return the samples of an epoch, and the number of batches that the data loader states."""
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, **options)
    return [int(value) for batch in loader for value in batch], len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_without_the_samples(workers: int) -> None:
    """All other samples come once, and lengths are right."""
    from torch.utils.data import RandomSampler

    from watchstep.pytorch.loaders.skipping import SkippingSampler

    dataset: Any = Numbers(20)
    sampler = SkippingSampler(RandomSampler(dataset), _list(3, 7, 99))
    samples, batches = _loaded(dataset, sampler=sampler, batch_size=4, num_workers=workers)
    assert sorted(samples) == [number for number in range(20) if number not in {3, 7}]
    assert (len(sampler), batches) == (18, 5)


def test_subsets_are_resolved() -> None:
    """Ids of the list are indices in the dataset below a subset, as they are recorded."""
    from torch.utils.data import SequentialSampler, Subset

    from watchstep.pytorch.loaders.skipping import SkippingBatchSampler, SkippingSampler

    numbers: Any = Numbers(20)
    subset: Any = Subset(numbers, [19, 3, 5, 7])
    sampler = SkippingSampler(SequentialSampler(subset), _list(3, 0), dataset=subset)
    assert list(sampler) == [0, 2, 3]
    assert len(sampler) == 3
    assert _loaded(subset, sampler=sampler, batch_size=2)[0] == [19, 5, 7]
    assert list(SkippingBatchSampler([[0, 1], [1], [2, 3]], _list(3), dataset=subset)) == [[0], [2, 3]]


@given(st.sets(st.integers(0, 29), max_size=25), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_ranks_have_equal_lengths(skipped: set[int], ranks: int, epoch: int) -> None:
    """Of a distributed sampler each rank has the length that it had, without the left-out samples, or fails before it trains on any."""
    from torch.utils.data.distributed import DistributedSampler

    from watchstep.pytorch.loaders.skipping import SkippingSampler

    dataset: Any = Numbers(30)
    seen: set[int] = set()
    for rank in range(ranks):
        plain: Any = DistributedSampler(dataset, num_replicas=ranks, rank=rank)
        plain.set_epoch(epoch)
        own = set(plain)
        sampler = SkippingSampler(plain, _list(*skipped))
        sampler.set_epoch(epoch)
        if own <= skipped:
            with pytest.raises(ConfigError, match="all samples"):
                list(sampler)
            return
        samples = list(sampler)
        assert len(samples) == len(sampler) == len(plain)
        assert set(samples) == own - skipped
        seen |= set(samples)
    assert seen == set(range(30)) - skipped


def test_batches() -> None:
    """Batches shrink, and empty ones are left out; replaced, their number and sizes stay."""
    from watchstep.pytorch.loaders.skipping import SkippingBatchSampler

    batches = [[9, 1], [0, 1, 2], [3, 4], [5, 9, 9]]
    skip_list = _list(9, 3, 4)
    assert list(SkippingBatchSampler(batches, skip_list)) == [[1], [0, 1, 2], [5]]
    assert list(SkippingBatchSampler(batches, skip_list, replace=True)) == [
        [1, 1],
        [0, 1, 2],
        [0, 1],
        [5, 5, 5],
    ]
    assert len(SkippingBatchSampler(batches, skip_list)) == 4


def test_lengths_that_are_unknown() -> None:
    """A length that depends on what a sampler will draw is not stated."""
    from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    from watchstep.pytorch.loaders.skipping import SkippingSampler

    dataset: Any = Numbers(9)
    for sampler in (
        WeightedRandomSampler([1.0] * 9, 9),
        RandomSampler(dataset, replacement=True),
        RandomSampler(dataset, num_samples=4),
    ):
        with pytest.raises(TypeError, match="unknown"):
            len(SkippingSampler(sampler, _list(1)))
        assert len(SkippingSampler(sampler, _list(1), replace=True)) == len(sampler)
    assert len(SkippingSampler(SubsetRandomSampler([1, 2, 3]), _list(1))) == 2
    with pytest.raises(TypeError, match="no length"):
        len(SkippingSampler(iter([1]), _list(1)))
    with pytest.raises(ConfigError, match="SkippingBatchSampler"):
        SkippingSampler(BatchSampler([1, 2], 1, drop_last=False), _list(1))
