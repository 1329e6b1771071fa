"""The rows about objects with full tensors in what a run wrote, and what holds for them in every run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from watchstep import Run
from watchstep.format.layout import SegmentKey
from watchstep.format.segment import decode
from watchstep.format.tensors import SavedName
from watchstep.store.store import Store


class Mark(NamedTuple):
    """A row about an object."""

    at: int
    worker: int
    mode: str
    collection: str
    step: int


def marks_of(run: Run) -> list[Mark]:
    rows, found = run.rows(), []
    for row in range(len(rows)):
        name = SavedName.of(rows.catalogue[rows.tensor[row]])
        if name is not None:
            step, value = int(rows.step[row]), rows.statistics.mean[row]
            found.append(Mark(step, int(rows.worker[row]), name.mode, name.collection, int(value)))
    return found


def assert_one_for_each_object(run: Run, folder: Path | None = None) -> None:
    """Each object has a row at its step or later, and no row is about another object. In the store of a folder, steps never go back."""
    marks = marks_of(run)
    saved = [(mark.worker, mark.mode, mark.collection, mark.step) for mark in marks]
    assert sorted(saved) == sorted(
        (key.worker, key.mode, key.collection, key.step) for key in run.snapshots()
    )
    assert all(mark.at >= mark.step for mark in marks)
    if folder is not None:
        assert_steps_never_go_back(folder)


def assert_steps_never_go_back(folder: Path, run: str = "r") -> None:
    """The segments of a writer have ascending steps, as does each rank's rows within them."""
    store = Store.open(folder).child(f"default/{run}")
    keys = sorted(SegmentKey.parse(entry.key) for entry in store.entries("stats/"))
    last: dict[tuple[str, int], int] = {}
    for key in keys:
        block = decode(store.get(key.path, limit=1 << 30), key.path)
        for worker in set(block.worker.tolist()):
            steps = block.step[block.worker == worker]
            assert steps.min() > last.get((key.writer.writer, worker), -1)
            assert key.first <= steps.min() <= steps.max() <= key.last
            last[key.writer.writer, worker] = int(steps.max())
    # A rank that takes over from one that left may continue its segments, or begin its own.
    for writer in {key.writer for key in keys}:
        numbers = [key.seq for key in keys if key.writer == writer]
        assert numbers == list(range(len(numbers)))
