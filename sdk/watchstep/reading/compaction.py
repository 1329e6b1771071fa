"""Compaction: rewriting a finished run's segments ordered by tensor and step, so that reading one series is one short request.

``compacted/<generation>/``: a claim, created only if absent; segments; the manifest, written last. An interrupted compaction leaves a
generation without a manifest, which readers ignore. Two concurrent compactions use two generations, and each is complete.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, concatenate
from watchstep.format.catalogue import catalogue_bytes, metadata
from watchstep.format.layout import SegmentKey
from watchstep.format.parquet.table import to_table
from watchstep.format.segment_checks import CONSTANT, PROBE
from watchstep.format.statistics import VALUE_COLUMNS
from watchstep.reading.budget import ReadBudget
from watchstep.reading.columns import Selection
from watchstep.reading.compacted import (
    COMPACTED,
    CompactedAttempt,
    CompactedSegment,
    Manifest,
    encode,
    generation_of,
    manifest_key,
)
from watchstep.reading.index import RunIndex
from watchstep.reading.run import open_run
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_SEGMENT_ROWS = 100_000
"""Rows of a segment, except one with a longer tensor: reading one series decodes no more than this."""

_MAX_ROWS = 200_000
"""Maximum rows of any segment; a tensor with more is split by steps. With histograms of 80 bins this is within the limits of readers."""

_PASS_BYTES = 256 * 1024 * 1024
"""Size of the rows that are written at the same time: about a million without histograms. A longer run is read several times."""

_PASS_SECONDS, _PASS_MEGABYTES = 24 * 3600, 1024
"""Limits of reading these rows, which are in memory twice. A step of one tensor is not split: one that exceeds the limits is refused."""

_RECENT_ROWS = 16_384

_MOSTLY_ZERO = ("nan", "pos_inf", "neg_inf", "zero")
"""Counts that are not read from objects in which they are all zero; most derived figures need them."""


@dataclass(frozen=True)
class Compaction:
    """The result of a compaction.

    Attributes:
        generation: the generation in use now.
        written: number of written objects; 0 if there was nothing new.
        deleted: number of deleted objects.
    """

    generation: int
    written: int
    deleted: int


def compact(
    run_url: str | os.PathLike[str] | Store,
    *,
    delete_after: float | None = None,
    may_delete: Callable[[SegmentKey], bool] | None = None,
) -> Compaction:
    """Compact a run. Safe to repeat, to interrupt and to run concurrently; the results of readers do not change.

    Args:
        run_url: as for `watchstep.open_run`.
        delete_after: seconds for which originals and older generations are kept after the compaction that replaces them;
            older ones are deleted now. None keeps them forever.
        may_delete: returns whether an original may be deleted; by default all may.

    Raises:
        NotFoundError: the run does not exist.
        OverBudgetError: the rows of one tensor at one step take too much memory; existing data is unchanged.
        StoreError: the store cannot be read or written; existing data is unchanged.
    """
    store = open_run(run_url).store
    index = RunIndex(store).judged()
    index.refresh()
    written = 0
    if index.manifest is None or index.segments:
        written = _write_generation(store)
        index.refresh()
    assert index.manifest is not None
    deleted = 0 if delete_after is None else _delete_old(store, index.manifest, delete_after, may_delete)
    return Compaction(index.manifest.generation, written, deleted)


def _write_generation(store: Store) -> int:
    generation = claim_generation(store)
    # Listed after the claim, which prevents the deletion of originals meanwhile.
    index = RunIndex(store).judged()
    index.refresh()
    attempts = index.consistently(lambda: _written_attempts(store, index, generation))
    sources = {*(index.manifest.sources if index.manifest else ()), *(key.path for key in index.segments)}
    sources -= index.damaged.keys()
    manifest = Manifest(generation, time.time_ns(), tuple(sorted(sources)), attempts)
    store.create(manifest_key(generation), encode(manifest))
    return sum(len(attempt.segments) + (attempt.recent is not None) for attempt in attempts) + 1


def _written_attempts(store: Store, index: RunIndex, generation: int) -> tuple[CompactedAttempt, ...]:
    while True:
        damaged = dict(index.damaged)
        attempts = tuple(_attempt(store, index, attempt, generation) for attempt in index.attempts())
        if index.damaged == damaged:
            return attempts
        # A segment turned out to be damaged after some of its rows were written: write everything again, without it.


def claim_generation(store: Store) -> int:
    """Claim the next generation of a run's compaction; its manifest makes it visible.

    Raises:
        StoreError: the store refuses.
    """
    generations = [match[0] for entry in store.entries(COMPACTED) if (match := generation_of(entry.key))]
    generation = max(generations, default=0) + 1
    while not store.create(_claim_key(generation), json.dumps({"created_ns": time.time_ns()}).encode()):
        generation += 1
    return generation


def _claim_key(generation: int) -> str:
    return f"{COMPACTED}{generation:010d}/claim.json"


def _attempt(store: Store, index: RunIndex, attempt: str, generation: int) -> CompactedAttempt:
    catalogue = tuple(index.tensors_of(attempt))
    order = {info.name: index for index, info in enumerate(catalogue)}
    # Tensors of a collection follow each other, because pictures read one collection, and skip the objects of the others.
    by_collection = sorted(catalogue, key=lambda info: (info.collections, info.order, info.name))
    ranks = {info.name: rank for rank, info in enumerate(by_collection)}
    packed = catalogue_bytes(catalogue)
    writer = _CompactedWriter(store, f"{COMPACTED}{generation:010d}/{attempt}/", packed)
    segments: list[CompactedSegment] = []
    started: list[int] = []
    for selection in _passes(index, attempt, list(ranks)):
        block = _by_tensor(_rows(index, attempt, selection), ranks)
        started.append(int(block.time_ns.min()))
        segments.extend(writer.write(piece, order) for piece in _pieces(block))
    since = _recent_from(index, attempt)
    recent = _by_tensor(_rows(index, attempt, Selection((), None, since)), ranks)
    fits = 0 < len(recent) <= _MAX_ROWS
    return CompactedAttempt(
        attempt,
        index.start_of(attempt) if len(index.attempts()) > 1 else min(started, default=0),
        packed.decode(),
        tuple(segments),
        writer.write(recent, order) if fits else None,
    )


def _rows(index: RunIndex, attempt: str, selection: Selection) -> Block:
    return concatenate(_bounded(index).blocks(attempt, selection))


def _bounded(index: RunIndex) -> RunIndex:
    index.budget = ReadBudget(_PASS_SECONDS, _PASS_MEGABYTES)
    return index


def _passes(index: RunIndex, attempt: str, names: list[str]) -> Iterator[Selection]:
    """Yield the rows that are in memory at the same time, by tensor: some tensors, or some steps of a large one."""
    sizes = dict.fromkeys(names, 0.0)
    for located in index.objects(attempt):
        row_bytes = located.object.decoded_bytes(located.object.columns) / located.object.rows
        for name, rows in index.rows_by_tensor(located).items():
            sizes[name] += rows * row_bytes
    group: list[str] = []
    for name in names:
        if group and sum(sizes[name] for name in group) + sizes[name] > _PASS_BYTES:
            yield Selection((), frozenset(group))
            group = []
        if sizes[name] > _PASS_BYTES:
            yield from _passes_of_tensor(index, attempt, name, sizes[name])
        elif sizes[name]:
            group.append(name)
    if group:
        yield Selection((), frozenset(group))


def _passes_of_tensor(index: RunIndex, attempt: str, name: str, size: float) -> Iterator[Selection]:
    steps, counts = _bounded(index).rows_by_step(attempt, tensor=name)
    rows = np.cumsum(counts)
    passes = rows * (size / rows[-1]) // _PASS_BYTES
    starts = np.append(0, np.flatnonzero(np.diff(passes)) + 1)
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        yield Selection((), frozenset([name]), int(steps[start]), int(steps[end - 1]))


def _by_tensor(block: Block, ranks: dict[str, int]) -> Block:
    """Order rows by tensor, step, worker, mode and place; the order of equal rows is preserved."""
    rank = np.array([ranks[info.name] for info in block.catalogue] or [0], np.int64)
    places = block.places
    keys = (places.stage, places.replica, places.shard_index, block.mode, block.worker, block.step)
    return block.take(np.lexsort((*keys, rank[block.tensor])))


def _pieces(block: Block) -> Iterator[Block]:
    """Yield pieces of whole tensors, of at most `_SEGMENT_ROWS` rows if their tensors are shorter."""
    ends = np.append(np.flatnonzero(np.diff(block.tensor)) + 1, len(block))
    start = 0
    for index, end in enumerate(ends):
        after = ends[index + 1] if index + 1 < len(ends) else None
        if after is not None and after - start <= _SEGMENT_ROWS:
            continue
        for first in range(start, int(end), _MAX_ROWS):
            yield block.take(np.arange(first, min(int(end), first + _MAX_ROWS)))
        start = int(end)


def _recent_from(index: RunIndex, attempt: str) -> int:
    """Return the first of the last steps whose rows fit into one small object; at least the last step is included."""
    last = max((located.object.last for located in index.objects(attempt)), default=0)
    first = max(
        (located.object.first for located in index.objects(attempt) if located.object.last == last), default=0
    )
    steps, counts = _bounded(index).rows_by_step(attempt, first)
    recent_steps = int(np.searchsorted(np.cumsum(counts[::-1]), _RECENT_ROWS, side="right"))
    return int(steps[-max(1, recent_steps)]) if len(steps) else last


def encode_compacted(table: pa.Table) -> bytes:
    """Encode a compacted segment from its table with metadata."""
    import pyarrow.parquet as pq

    probes = [name for name in table.column_names if name.startswith(PROBE)]
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=len(table),
        use_dictionary=["tensor", *CONSTANT],
        use_byte_stream_split=[*VALUE_COLUMNS, *probes],
        write_statistics=["step", "tensor"],
        write_page_checksum=True,
    )
    return sink.getvalue()


class _CompactedWriter:
    def __init__(self, store: Store, prefix: str, catalogue: bytes) -> None:
        self._store, self._prefix, self._metadata = store, prefix, metadata(catalogue)
        self._written = 0

    def write(self, block: Block, order: dict[str, int]) -> CompactedSegment:
        table = to_table(block).replace_schema_metadata(self._metadata)
        data = encode_compacted(table)
        key = f"{self._prefix}{self._written:06d}.parquet"
        self._written += 1
        self._store.put(key, data)
        return CompactedSegment(
            key,
            len(data),
            int(block.step.min()),
            int(block.step.max()),
            _runs(block, order),
            tuple(table.column_names),
            _constants(block),
        )


def _runs(block: Block, order: dict[str, int]) -> tuple[tuple[int, int], ...]:
    starts = np.append(0, np.flatnonzero(np.diff(block.tensor)) + 1)
    counts = np.diff(np.append(starts, len(block)))
    return tuple(
        (order[block.info(int(start)).name], int(rows)) for start, rows in zip(starts, counts, strict=True)
    )


def _constants(block: Block) -> dict[str, int]:
    columns: dict[str, NDArray[np.int32] | NDArray[np.int8]] = {
        "mode": block.mode,
        "worker": block.worker,
        **vars(block.places),
    }
    constants = {
        name: int(columns[name][0]) for name in CONSTANT if (columns[name] == columns[name][0]).all()
    }
    zeros = {name: 0 for name in _MOSTLY_ZERO if not getattr(block.statistics, name).any()}
    return constants | zeros


def _delete_old(
    store: Store, newest: Manifest, delete_after: float, may_delete: Callable[[SegmentKey], bool] | None
) -> int:
    """Delete what the newest manifest replaced, once it is old enough, unless another compaction is in progress."""
    if time.time_ns() - newest.created_ns < delete_after * 1e9:
        return 0
    keys = sorted(entry.key for entry in store.entries(COMPACTED))
    generations = {key: match[0] for key in keys if (match := generation_of(key))}
    if any(generation > newest.generation for generation in generations.values()):
        return 0
    old = [key for key in keys if generations.get(key, newest.generation) < newest.generation]
    # Delete a manifest before its segments, so that no reader starts to use it.
    old.sort(key=lambda key: (not key.endswith("/manifest.json"), key))
    originals = {entry.key for entry in store.entries("stats/")} & set(newest.sources)
    if may_delete is not None:
        originals = {key for key in originals if may_delete(SegmentKey.parse(key))}
    for key in [*old, *sorted(originals)]:
        store.delete(key)
    return len(old) + len(originals)
