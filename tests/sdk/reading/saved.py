"""Objects with full tensors, written straight onto a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format import documents
from watchstep.format.layout import SnapshotKey, attempt_document
from watchstep.format.snapshot import (
    DTYPES,
    Described,
    TensorPart,
    aligned_order,
    header,
    missing_metadata,
    parts_metadata,
)
from watchstep.store.store import Store

NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


def save(
    store: Store,
    key: SnapshotKey,
    tensors: Mapping[str, NDArray[Any]],
    *,
    parts: Mapping[str, TensorPart] | None = None,
    dtype: str | None = None,
    missing: Sequence[str] = (),
) -> None:
    """One object; ``dtype`` is the one of all tensors, whose bits the arrays are."""
    described = [
        Described(name, dtype or NAMES[array.dtype], tuple(array.shape)) for name, array in tensors.items()
    ]
    arrays = list(tensors.values())
    order = aligned_order(described)
    metadata = {**parts_metadata(parts or {}), **missing_metadata(missing)}
    data = b"".join(arrays[place].tobytes() for place in order)
    store.put(key.path, header([described[place] for place in order], metadata) + data)


def save_shards(
    store: Store,
    name: str,
    whole: NDArray[Any],
    boxes: Sequence[tuple[slice, ...]],
    *,
    step: int = 0,
    attempt: str = "a",
    dtype: str | None = None,
) -> None:
    """One object for each worker, with its shard of a tensor."""
    for worker, box in enumerate(boxes):
        start = tuple(part.start for part in box)
        part = TensorPart(whole.shape, start, is_shard=True)
        key = SnapshotKey(attempt, worker, step, "train", "weights")
        save(store, key, {name: np.ascontiguousarray(whole[box])}, parts={name: part}, dtype=dtype)


def claim(store: Store, attempt: str, started_ns: int = 1, workers: int = 1) -> None:
    """The document of an attempt."""
    document = documents.AttemptDocument(attempt, started_ns, workers)
    store.put(attempt_document(attempt), documents.encode(document))


def end(store: Store, attempt: str, worker: int, last_step: int) -> None:
    """The document about the end of a worker."""
    document = documents.EndDocument(worker, "completed", last_step, 1, 1, "w0")
    store.put(f"end/{attempt}/{worker}.json", documents.encode(document))
