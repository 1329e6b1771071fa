"""Samplers that leave out the samples of a skip list.

**Lengths.** Without ``replace`` fewer samples follow. With it, a sample that is left out is replaced by one that follows it in the
order of the sampler, so that the length stays, and some samples are used twice. Ranks of a distributed training must make equally many
steps: a `DistributedSampler` is therefore wrapped with ``replace`` unless the program states otherwise. Each rank then leaves out
the samples of its own part, as in `DistributedSampler`, which repeats samples for equal lengths as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from watchstep.errors import ConfigError
from watchstep.format.samples.skip_list import SkipList
from watchstep.pytorch.loaders.loader_batches import underlying_ids


class _Skipping:
    """What both samplers share: the samples to leave out, and the dataset that resolves subsets."""

    def __init__(self, skip_list: SkipList, dataset: Any) -> None:
        self._skip_list = skip_list
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._skip_list)

    def skips(self, index: Any) -> bool:
        """Return whether an index of the data loader's dataset is left out."""
        if self._dataset is not None:
            (index,) = underlying_ids(self._dataset, (index,))
        return self._skip_list.skips(index)


class SkippingSampler(Sampler[Any]):
    """Wraps a sampler, and leaves out the samples of a skip list.

    Example::

        skip_list = watchstep.load_skip_list("skip.json")
        sampler = SkippingSampler(RandomSampler(dataset), skip_list)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    """

    def __init__(
        self,
        sampler: Sampler[Any] | Iterable[Any],
        skip_list: SkipList,
        *,
        dataset: Any = None,
        replace: bool | None = None,
    ) -> None:
        """Wrap a sampler.

        Args:
            sampler: gives indices of the data loader's dataset.
            skip_list: the samples to leave out.
            dataset: the data loader's dataset, required if it is a `torch.utils.data.Subset`: recorded ids, and those of the list, are
                indices in the dataset below it.
            replace: replace samples instead of leaving them out, so that the length stays. Default: for a `DistributedSampler`.

        Raises:
            ConfigError: the sampler is one of batches.
        """
        if hasattr(sampler, "batch_size") and hasattr(sampler, "drop_last") and hasattr(sampler, "sampler"):
            raise ConfigError(
                f"SkippingSampler({type(sampler).__name__})",
                "use SkippingBatchSampler for a sampler of batches",
            )
        self.sampler = sampler
        self.replaces = isinstance(sampler, DistributedSampler) if replace is None else replace
        self._skipping = _Skipping(skip_list, dataset)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the indices of one epoch."""
        skips = self._skipping.skips
        if not self.replaces:
            return (index for index in self.sampler if not skips(index))
        return self._replacing()

    def _replacing(self) -> Iterator[Any]:
        """Replace each left-out sample by the next ones of the epoch that are not left out, from its beginning at its end."""
        used: list[Any] = []
        missing = 0
        for index in self.sampler:
            if self._skipping.skips(index):
                missing += 1
                continue
            if len(used) <= len(self._skipping):
                used.append(index)
            yield index
        if missing and not used:
            raise ConfigError(
                "the skip list leaves out all samples of an epoch of this rank", "shorten the skip list"
            )
        yield from itertools.islice(itertools.cycle(used), missing)

    def __len__(self) -> int:
        """Number of indices in an epoch.

        Raises:
            TypeError: it is unknown without iterating: the wrapped sampler has no length, or draws indices in a way of its own.
        """
        if not isinstance(self.sampler, Sized):
            raise TypeError(f"{type(self.sampler).__name__} has no length")
        length = len(self.sampler)
        if self.replaces:
            return length
        indices = _indices_of(self.sampler)
        if indices is None:
            raise TypeError(
                f"the length of a {type(self.sampler).__name__} without the left-out samples is unknown"
            )
        return length - sum(map(self._skipping.skips, indices))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the wrapped sampler, if it has one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class SkippingBatchSampler(Sampler[list[Any]]):
    """Wraps a sampler of batches, and leaves out the samples of a skip list. A batch of which nothing is left is left out."""

    def __init__(
        self,
        batch_sampler: Sampler[list[Any]] | Iterable[Sequence[Any]],
        skip_list: SkipList,
        *,
        dataset: Any = None,
        replace: bool = False,
    ) -> None:
        """Wrap a sampler of batches.

        Args:
            batch_sampler: gives lists of indices of the data loader's dataset.
            skip_list: the samples to leave out.
            dataset: as for `SkippingSampler`.
            replace: fill batches with samples of their own, or of the last batch before, so that number and size of batches stay, as
                ranks of a distributed training require. A batch before which there is none is left out nevertheless.
        """
        self.batch_sampler = batch_sampler
        self.replaces = replace
        self._skipping = _Skipping(skip_list, dataset)

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterate over the batches of one epoch."""
        last: list[Any] = []
        for batch in self.batch_sampler:
            chosen = [index for index in batch if not self._skipping.skips(index)]
            last = chosen or last
            if self.replaces and last:
                filling = itertools.islice(itertools.cycle(last), len(batch) - len(chosen))
                yield [*chosen, *filling]
            elif chosen:
                yield chosen

    def __len__(self) -> int:
        """Number of batches in an epoch, including those of which nothing is left.

        Raises:
            TypeError: the wrapped sampler has no length.
        """
        if not isinstance(self.batch_sampler, Sized):
            raise TypeError(f"{type(self.batch_sampler).__name__} has no length")
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the wrapped sampler, or of the sampler below it, if it has one."""
        for candidate in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if (set_epoch := getattr(candidate, "set_epoch", None)) is not None:
                set_epoch(epoch)


def _indices_of(sampler: Any) -> Iterable[Any] | None:
    """Return the indices that a sampler gives in some order, each once; None if they are unknown."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is SubsetRandomSampler or isinstance(sampler, list | tuple | range):
        return sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
    if type(sampler) is RandomSampler and not sampler.replacement:
        length = len(sampler.data_source)
        return range(length) if sampler.num_samples == length else None
    return None
