"""Each step is recorded with the samples that it was trained on, and samplers leave out those of a skip list. A sample is its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.programs import ROOT, record_program
from tests.sdk.pytorch.loaders.test_loader_batches import Numbers
from watchstep import CaptureConfig, Hook, Run, SkipList
from watchstep.errors import ConfigError
from watchstep.format.samples.samples import SampleId


class Indices:
    """Samples of one feature: their index."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Program:
    """A training, and which samples each of its steps used."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.hook = Hook(folder, config=CaptureConfig(overhead_budget=None, system=None))
        self.hook.watch(self.model, self.optimizer)
        self.truth: list[list[int]] = []

    def forward(self, batch: Any) -> Any:
        """Compute a loss, as training does."""
        return self.model(batch.to(self.model.weight.dtype)).sum()

    def train_step(self, *batches: Any) -> None:
        """Train one step on some micro-batches."""
        for batch in batches:
            self.forward(batch).backward()
        self.update(*batches)

    def update(self, *batches: Any) -> None:
        """Update, and remember the truth."""
        self.truth.append([int(value) for batch in batches for value in batch.flatten().tolist()])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, loader: Any) -> None:
        """Evaluate with gradients enabled, as careless programs do."""
        self.model.eval()
        for batch in loader:
            self.forward(batch)
        self.model.train()

    def check(self) -> Run:
        """Compare all steps with the truth."""
        from watchstep import open_run

        self.hook.close()
        assert self.hook.health["faults"] == {}
        run = open_run(self.hook.run_url)
        assert _recorded(run, len(self.truth)) == self.truth
        return run


def _recorded(run: Run, steps: int) -> list[list[SampleId]]:
    return [[sample for batch in run.samples(step) for sample in batch.ids] for step in range(steps)]


def _loader(**options: Any) -> Any:
    from torch.utils.data import DataLoader

    dataset: Any = Indices()
    return DataLoader(dataset, **{"batch_size": 8, "shuffle": True, **options})


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program whose hook is closed at the end."""
    made = Program(tmp_path)
    yield made
    made.hook.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_have_their_batches(program: Program, workers: int) -> None:
    """The order of attribution is the truth, with and without worker processes; epochs and batches are numbered."""
    loader = _loader(num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        for batch in loader:
            program.train_step(batch)
    run = program.check()
    (batch,) = run.samples(7)
    assert (batch.source, batch.epoch, batch.number, batch.worker) == ("Indices", 1, 1, 0)
    assert [found.step for found in run.samples(range(2, 5), worker=0)] == [2, 3, 4]
    assert run.samples(3, worker=1) == []
    assert program.hook.health["counts"]["sample_uploads"] >= 1  # more on a machine that takes long


def test_micro_batches_add_up(program: Program) -> None:
    """All micro-batches of an update belong to its step, whether they are fetched together or one by one."""
    batches = iter(_loader(batch_size=4))
    for _ in range(3):
        program.train_step(next(batches), next(batches))
    for _ in range(2):
        micro_batches = []
        for _ in range(2):
            micro_batches.append(next(batches))
            program.forward(micro_batches[-1]).backward()
        program.update(*micro_batches)
    run = program.check()
    assert [len(run.samples(step)) for step in range(5)] == [2] * 5


def test_evaluations_are_not_recorded(program: Program) -> None:
    """Before the first step, between a batch and its training, without gradients, and by the program's mode."""
    evaluation = _loader(batch_size=16)
    program.evaluate(evaluation)
    for number, batch in enumerate(_loader()):
        if number % 2 == 0:
            program.evaluate(evaluation)
        program.train_step(batch)
        with torch.no_grad():
            for _ in evaluation:
                pass
        program.hook.mode = "eval"
        for _ in evaluation:
            program.hook.samples([-1])
        program.hook.mode = "train"
    program.check()


def test_generation_before_the_first_step(program: Program) -> None:
    """A model in eval mode that is called between receiving a batch and training on it does not lose the batch."""
    for batch in _loader():
        program.model.eval()
        program.model(torch.zeros(1, 1))
        program.model.train()
        program.train_step(batch)
    program.check()


def test_two_loaders(program: Program) -> None:
    """A step that uses batches of two data loaders has both."""
    for first, second in zip(_loader(), _loader(batch_size=4), strict=False):
        program.train_step(first, second)
    program.check()


def test_models_whose_passes_are_not_observed(program: Program) -> None:
    """Without an observed forward pass, a batch belongs to the next update."""
    evaluation = _loader(batch_size=16)
    for batch in _loader():
        loss = (batch.float() @ program.model.weight.T).sum()
        loss.backward()
        program.update(batch)
        for _ in evaluation:
            pass
    program.check()


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(lambda ids: ids, id="list"),
        pytest.param(np.array, id="array"),
        pytest.param(lambda ids: iter(np.array(ids, np.uint8)), id="iterable"),
        pytest.param(lambda ids: __import__("torch").tensor(ids), id="tensor"),
    ],
)
def test_programs_that_name_samples(program: Program, named: Callable[[list[int]], Any]) -> None:
    """What the program names is believed, instead of what data loaders yield; several calls of a step add up."""
    for batch in _loader(batch_size=4):
        ids = [100 + int(value) for value in batch]
        program.hook.samples(named(ids))
        program.hook.samples(7)
        program.forward(batch).backward()
        program.truth.append([*ids, 7])
        program.optimizer.step()
    run = program.check()
    assert [found.source for found in run.samples(3)] == ["", ""]


def test_faults_are_counted(program: Program) -> None:
    """An id that names no sample is a fault of the recording, and does not reach the program."""
    program.hook.samples([1.5])
    program.hook.samples("file.txt")
    program.train_step(next(iter(_loader())))
    program.hook.close()
    assert list(program.hook.health["faults"]) == ["samples"]


def test_nothing_is_recorded_without_room(tmp_path: Path) -> None:
    """A size of 0 turns it off: no thread, no file, no object."""
    from watchstep import Bounds, open_run

    bounds = Bounds(sample_bytes=0)
    with Hook(tmp_path, config=CaptureConfig(bounds=bounds, system=None)) as hook:
        hook.samples([1])
        hook.step()
    assert open_run(hook.run_url).samples(0) == []
    assert "sample_uploads" not in hook.health["counts"]


@pytest.mark.ci
def test_the_gate_uploads_during_the_training(program: Program) -> None:
    """Samples of a step with NaN are on the store while the program still trains."""
    from watchstep import open_run

    loader = iter(_loader())
    program.train_step(next(loader))
    batch = next(loader)
    (program.forward(batch) * torch.nan).backward()
    program.update(batch)
    while "sample_uploads" not in program.hook.health["counts"]:
        assert program.hook.health["faults"] == {}
    assert _recorded(open_run(program.hook.run_url), 2) == program.truth
    program.train_step(next(loader))
    run = program.check()
    assert len({found.step for found in run.samples(range(3))}) == 3
    assert program.hook.health["counts"]["sample_uploads"] == 2


UNMODIFIED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader
from tests.sdk.pytorch.loaders.test_loader_samples import Indices

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
if __name__ == "__main__":
    for batch in DataLoader(Indices(), batch_size=8, shuffle=True, num_workers=int(sys.argv[2])):
        model(batch).sum().backward()
        optimizer.step()
        print(*(int(value) for value in batch))
"""


@pytest.mark.ci
def test_unmodified_programs(tmp_path: Path) -> None:
    """``watchstep run`` records the samples from the first step on, which ends before the recording begins."""
    from watchstep import open_run

    program = tmp_path / "train.py"
    program.write_text(UNMODIFIED)
    options = ("--store", tmp_path / "store", "--run", "r")
    done = record_program(program, ROOT, "2", folder=ROOT, options=options)
    truth = [[int(word) for word in line.split()] for line in done.output.splitlines()]
    assert len(truth) == 6
    assert _recorded(open_run(tmp_path / "store" / "default" / "r"), 6) == truth


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


@pytest.mark.ci
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
