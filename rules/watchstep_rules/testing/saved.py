"""Full tensors of a rule test: objects in memory as recorders write them, and the rows about them.

A row about an object has the step of the object, so that findings and alerts of a test refer to the steps that it lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, Places
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import DTYPES, Described, aligned_order, header, infos_metadata
from watchstep.format.statistics import scalars
from watchstep.format.tensors import MODES, Placement, SavedName, TensorInfo
from watchstep.store.store import Store
from watchstep_rules.engine.saved_tensors import ReferenceRun, SavedTensors
from watchstep_rules.testing.file import SavedSeries, array_of

_ATTEMPT = "test"
_REFERENCE = "reference"
_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}
_Values = dict[TensorInfo, NDArray[Any]]


def saved_rows(
    entries: Sequence[tuple[SavedSeries, TensorInfo]], workers: int, time_ns: Callable[[int], int]
) -> tuple[list[Block], Callable[[], SavedTensors]]:
    """Store the tensors of a test.

    Args:
        entries: the tensors with their descriptions.
        workers: number of workers; each has all tensors that name no worker.
        time_ns: the time of a step.

    Returns:
        The rows about the objects, and a function that returns a reader of them for each evaluation.
    """
    from obstore.store import MemoryStore

    root = Store("memory:", MemoryStore())
    store, reference = root.child("test/"), root.child("reference/")
    objects: dict[SnapshotKey, _Values] = {}
    references: dict[SnapshotKey, _Values] = {}
    for entry, info in entries:
        for worker in range(workers) if entry.worker is None else (entry.worker,):
            for step, values in entry.values.items():
                key = SnapshotKey(_ATTEMPT, worker, step, entry.mode, info.collections[0])
                objects.setdefault(key, {})[info] = array_of(values, entry.dtype)
            for step, values in entry.reference.items():
                key = SnapshotKey(_REFERENCE, worker, step, entry.mode, info.collections[0])
                references.setdefault(key, {})[info] = array_of(values, entry.dtype)
    for target, written in ((store, objects), (reference, references)):
        for key, tensors in written.items():
            target.put(key.path, _encoded(tensors))
    marks = [_mark(key, time_ns(key.step)) for key in objects]

    def reader() -> SavedTensors:
        return SavedTensors(store, _ATTEMPT, lambda run: ReferenceRun(run, _REFERENCE, reference))

    return marks, reader


def _encoded(tensors: _Values) -> bytes:
    described = [Described(info.name, _NAMES[array.dtype], array.shape) for info, array in tensors.items()]
    arrays = list(tensors.values())
    order = aligned_order(described)
    start = header([described[place] for place in order], infos_metadata(tensors))
    return start + b"".join(arrays[place].tobytes() for place in order)


def _mark(key: SnapshotKey, time_ns: int) -> Block:
    mode = next(mode for mode in MODES if mode == key.mode)
    return Block(
        step=np.array([key.step], np.int64),
        mode=np.array([MODES.index("global")], np.int8),
        worker=np.array([key.worker], np.int32),
        time_ns=np.array([time_ns], np.int64),
        tensor=np.zeros(1, np.int32),
        catalogue=(SavedName(mode, key.collection).info(),),
        places=Places.of([Placement()]),
        statistics=scalars([float(key.step)]),
    )
