"""Every batch of a data loader is reported with the samples that are in it, however it was loaded."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.ci


class Reported:
    """A listener that collects what is reported, with the contents of each batch."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []
        self.contents: list[list[Any]] = []
        self.ids: list[list[Any] | None] = []
        self.references: list[Sequence[Any] | None] = []
        self.places: list[tuple[int, int]] = []
        self.errors: list[Exception] = []

    def batch_yielded(
        self, loader: Any, batch: Any, sample_ids: Sequence[Any] | None, epoch: int, number: int
    ) -> None:
        """Collect."""
        self.loaders.append(loader)
        self.contents.append(batch.flatten().tolist() if hasattr(batch, "flatten") else [batch])
        self.references.append(sample_ids)
        self.ids.append(None if sample_ids is None else [_plain(value) for value in sample_ids])
        self.places.append((epoch, number))

    def failed(self, error: Exception) -> None:
        """Collect."""
        self.errors.append(error)


def _plain(value: Any) -> Any:
    return value if isinstance(value, dict) else int(value)


class Numbers:
    """A map-style dataset whose samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


class Uneven(Numbers):
    """Samples of the first worker's batches take longer to load than all others."""

    def __getitem__(self, index: int) -> int:
        if index == 0:
            sum(range(3_000_000))
        return int(index)


def _loader(dataset: Any, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, **options)


def _streamed(length: int) -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class Streamed(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            first, interval = (0, 1) if worker is None else (worker.id, worker.num_workers)
            return iter(range(first, length, interval))

    return Streamed()


@pytest.fixture
def loader_batches() -> Iterator[Any]:
    """The module, whose methods are all restored afterwards."""
    from torch.utils.data import dataloader

    from watchstep.pytorch.loaders import loader_batches

    before = (dataloader._BaseDataLoaderIter.__next__, dataloader._BaseDataLoaderIter._next_index)
    yield loader_batches
    gc.collect()
    assert (dataloader._BaseDataLoaderIter.__next__, dataloader._BaseDataLoaderIter._next_index) == before


def listening(loader_batches: Any, reported: Reported | None = None) -> Reported:
    """A listener that listens."""
    reported = reported or Reported()
    loader_batches.listen(reported)
    return reported


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": True},
        {"batch_size": None, "shuffle": True},
        {"batch_sampler": [[5, 1], [2], [9, 9, 0]]},
        {"batch_size": 2, "shuffle": True, "num_workers": 2, "prefetch_factor": 3, "drop_last": True},
    ],
    ids=["in-process", "persistent-workers", "no-batches", "batch-sampler", "workers"],
)
def test_ids_are_the_contents(loader_batches: Any, options: dict[str, Any]) -> None:
    """The samples of a batch are reported with it, in two epochs of every kind of data loader."""
    loader = _loader(Numbers(11), **options)
    reported = listening(loader_batches)
    received = [batch for _ in range(2) for batch in loader]
    assert reported.errors == []
    assert reported.ids == reported.contents
    assert len(received) == len(reported.ids) == 2 * len(loader)
    assert all(value is loader for value in reported.loaders)
    assert reported.places == [(epoch, number) for epoch in range(2) for number in range(len(loader))]
    loader_batches.forget(reported)


def test_batches_in_the_order_of_arrival(loader_batches: Any) -> None:
    """With ``in_order=False`` the ids are those of the batch that arrived."""
    loader = _loader(Uneven(24), batch_size=2, num_workers=2, in_order=False)
    reported = listening(loader_batches)
    for _ in loader:
        pass
    assert reported.ids == reported.contents
    assert sorted(value for ids in reported.ids if ids for value in ids) == list(range(24))


def test_an_epoch_that_was_left_early(loader_batches: Any) -> None:
    """Requests of an abandoned epoch of persistent workers are not mistaken for those of the next."""
    loader = _loader(
        Numbers(40), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True, in_order=False
    )
    reported = listening(loader_batches)
    for _ in range(3):
        for _, _ in zip(range(3), loader, strict=False):
            pass
    assert reported.ids == reported.contents


def test_subsets_are_resolved(loader_batches: Any) -> None:
    """Ids of a subset of a subset are indices in the dataset itself."""
    from torch.utils.data import Subset

    numbers: Any = Numbers(100)
    inner = Subset(numbers, [90, 80, 70, 60, 50])
    reported = listening(loader_batches)
    for _ in _loader(Subset(inner, [4, 0, 2]), batch_size=2):
        pass
    assert reported.ids == reported.contents == [[50, 90], [70]]


def test_epochs_of_a_distributed_sampler(loader_batches: Any) -> None:
    """A sampler that knows its epoch names it."""
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = Numbers(8)
    sampler: Any = DistributedSampler(numbers, num_replicas=2, rank=1)
    loader = _loader(numbers, batch_size=2, sampler=sampler)
    reported = listening(loader_batches)
    sampler.set_epoch(7)
    assert len(list(loader)) == 2
    assert reported.ids == reported.contents
    assert reported.places == [(7, 0), (7, 1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_name_the_worker_and_its_batch(loader_batches: Any, workers: int) -> None:
    """Batches of an iterable dataset are identified by the worker and its running number."""
    reported = listening(loader_batches)
    for _ in _loader(_streamed(10), batch_size=2, num_workers=workers):
        pass
    interval = max(1, workers)
    for ids, contents in zip(reported.ids, reported.contents, strict=True):
        assert ids is not None
        (place,) = ids
        first = place["batch"] * 2
        expected = range(place["loader_worker"], 10, interval)[first : first + 2]
        assert contents == list(expected)


def test_an_iteration_that_had_begun(loader_batches: Any) -> None:
    """Batches that were requested from workers before the first listener are reported without ids; later ones with them."""
    loader = _loader(Numbers(20), batch_size=2, num_workers=2, prefetch_factor=1)
    batches = iter(loader)
    reported = listening(loader_batches)
    for _ in batches:
        pass
    assert reported.ids[:2] == [None, None]
    assert reported.ids[2:] == reported.contents[2:]
    assert reported.places[0] == (0, 0)


def test_accelerate_fetches_one_ahead(loader_batches: Any) -> None:
    """Batches of Accelerate's data loaders are reported when they are passed on, without those that are skipped."""
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare(_loader(Numbers(10), batch_size=4, shuffle=True))
    loader.skip_batches = 1
    reported = listening(loader_batches)
    received = []
    for batch in loader:
        received.append(batch.tolist())
        assert reported.ids == received
    assert len(received) == 2


def test_methods_are_replaced_only_while_somebody_listens(loader_batches: Any) -> None:
    """The last listener's end restores PyTorch's methods; a replacement of the program's on top of ours remains and works."""
    from torch.utils.data import dataloader

    iterators: Any = dataloader._BaseDataLoaderIter
    original = iterators.__next__
    reported, other = Reported(), Reported()
    loader_batches.listen(reported)
    loader_batches.listen(other)
    own = iterators.__next__
    assert own is not original
    del other
    gc.collect()
    assert iterators.__next__ is own

    def on_top(self: Any) -> Any:
        return own(self)

    iterators.__next__ = on_top
    loader_batches.forget(reported)
    assert iterators.__next__ is on_top
    assert len(list(_loader(Numbers(4)))) == 4
    loader_batches.listen(reported)  # the replaced method is the program's: it is not replaced again
    assert [batch.tolist() for batch in _loader(Numbers(4), batch_size=2)] == reported.ids
    iterators.__next__ = own
    loader_batches.forget(reported)


def test_faults_and_children_do_not_matter(loader_batches: Any) -> None:
    """A listener that raises changes nothing for the program, and a forked child does not notify."""

    class Broken(Reported):
        def batch_yielded(self, *arguments: Any) -> None:
            super().batch_yielded(*arguments)
            raise ValueError("broken")

    reported = listening(loader_batches, Broken())
    loader = _loader(Numbers(4), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert [str(error) for error in reported.errors] == ["broken", "broken"]
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        received = [batch.tolist() for batch in loader]
        sender.send((received, len(reported.errors)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.recv() == ([[0, 1], [2, 3]], 2)
    process.join()


class Wrapped:
    """A batch sampler around one whose length and truth draw numbers, and whose properties raise."""

    class Inner:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[3, 1], [2]])

        def __len__(self) -> int:
            raise TypeError("makes its batches")

        @property
        def epoch(self) -> int:
            raise AssertionError

        @property
        def sampler(self) -> Any:
            raise AssertionError

    def __init__(self) -> None:
        self.batch_sampler = self.Inner()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


class Again:
    """A batch sampler that gives one list again with other ids."""

    def __iter__(self) -> Iterator[list[int]]:
        given = [0, 0]
        for first in (0, 2, 4):
            given[:] = [first, first + 1]
            yield given


@pytest.mark.parametrize(("sampler", "workers"), [(Wrapped, 0), (Wrapped, 1), (Again, 0)])
def test_samplers_of_the_program_are_left_alone(loader_batches: Any, sampler: Any, workers: int) -> None:
    """No length, truth or property of a sampler is read, and the ids are those of the request."""
    reported = listening(loader_batches)
    loader = _loader(Numbers(6), batch_sampler=sampler(), num_workers=workers)
    batches = [batch.tolist() for _ in range(2) for batch in loader]
    assert reported.errors == []
    assert reported.ids == reported.references == batches
    assert [epoch for epoch, _ in reported.places] == sorted([0, 1] * (len(batches) // 2))


def test_subsets_with_indices_of_the_program(loader_batches: Any) -> None:
    """Indices that run code of the program are not read a second time."""
    from torch.utils.data import Subset

    class Drawn:
        reads = 0

        def __getitem__(self, index: int) -> int:
            self.reads += 1
            return index

        def __len__(self) -> int:
            return 4

    numbers: Any = Numbers(4)
    drawn: Any = Drawn()
    reported = listening(loader_batches)
    assert len(list(_loader(Subset(numbers, drawn), batch_size=2))) == 2
    assert drawn.reads == 4
    assert reported.ids == [None, None]


def test_loaders_are_distinguished_by_identity(loader_batches: Any) -> None:
    """Comparison and hash of a data loader of the program are not called."""
    from torch.utils.data import DataLoader

    class Odd(DataLoader[Any]):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError

    loader: Any = Odd(Numbers(2))  # type: ignore[arg-type]
    reported = listening(loader_batches)
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0], [1]] * 2
    assert reported.errors == []
    assert [epoch for epoch, _ in reported.places] == [0, 0, 1, 1]
