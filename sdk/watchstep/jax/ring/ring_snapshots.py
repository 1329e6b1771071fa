"""Snapshots of a ring of steps on their way to the host, and the updates that are read from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from watchstep.format.tensors import Placement
from watchstep.jax.device_rows import RowLayout, RowWords, statistics
from watchstep.jax.ring.ring_storage import EntryColumn, LedgerColumn, ReadCursor, RingStorage
from watchstep.jax.sharding.shard_rows import own_places, own_rows
from watchstep.updates.tensor_values import MeasuredRows
from watchstep.updates.update_recorder import Role


@dataclass(frozen=True)
class RingStep:
    """One update.

    Attributes:
        number: Rank of the update since the ring was created, from 0.
        is_bad: Whether a gradient or the loss is NaN or infinite.
        is_skipped: Whether the optimizer left the update out.
        gradients: Statistics of the gradients; None if the update has no rows, or they were overwritten.
        weights: Statistics of the weights before the update; None likewise.
        loss: The loss; None if the program gives none.
        has_bad_gradients: Whether a gradient is NaN or infinite.
        places: Which part of each gradient and weight was measured, if other processes measure parts of them.
    """

    number: int
    is_bad: bool
    is_skipped: bool
    gradients: MeasuredRows | None
    weights: MeasuredRows | None
    loss: float | None
    has_bad_gradients: bool
    places: Mapping[Role, Sequence[Placement]] = field(default_factory=dict)


@dataclass(frozen=True)
class StorageCopy:
    """Copies of a storage that are on their way to the host.

    Attributes:
        storage: The storage.
        cursor: Its cursor at the time of the copy.
        ledger: The ledger.
        rows: Rings of row sets, narrow and wide as in `RowWords`, those that exist; None if they were not copied. If devices have rows of their own, one of each
            device of this process in the order of their ids: first narrow, then wide ones.
    """

    storage: RingStorage
    cursor: ReadCursor
    ledger: Any
    rows: tuple[Any, ...] | None


@dataclass(frozen=True)
class RingSnapshot:
    """Copies of a ring that are on their way to the host.

    Attributes:
        copies: A copy of each storage.
    """

    copies: tuple[StorageCopy, ...]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that are copied."""
        return tuple(array for copy in self.copies for array in (copy.ledger, *(copy.rows or ())))

    @property
    def has_rows(self) -> bool:
        """Whether rows are among the copies."""
        return any(copy.rows is not None for copy in self.copies)

    @property
    def is_ready(self) -> bool:
        """Whether the device has computed the copies, so that reading does not wait for it. Never raises."""
        try:
            # `is_ready` of a deleted array ends the process with a segmentation fault.
            return all(array.is_deleted() or array.is_ready() for array in self.arrays)
        except Exception:  # noqa: BLE001 - of a failed dispatch; reading finds it
            return True

    def wait(self) -> None:
        """Wait until the device has computed the copies. Never raises: an error of a dispatch is the program's, which finds it in its results."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self.arrays)


class SnapshotReader:
    """Reads the updates of a ring, each once.

    Attributes:
        has_pending_bad: Whether a bad update is among those whose rows are not part of the last snapshot.
        is_complete: Whether the last read has returned all updates of its snapshot.
        missed_steps: Number of updates that were overwritten before they were read.
        missed_rows: Number of updates whose rows were.
    """

    def __init__(self) -> None:
        """Start without updates."""
        self._number = 0
        self.has_pending_bad = False
        self.is_complete = True
        self.missed_steps = 0
        self.missed_rows = 0

    def read(self, snapshot: RingSnapshot | None) -> list[RingStep]:
        """Return the updates of a snapshot that were not read before, in their order; none of None. Waits for the device unless `RingSnapshot.is_ready`.

        An update whose rows are not part of the snapshot, and those after it, are returned by the read of a later snapshot; `has_pending_bad` is whether a
        bad one is among them. Updates that were overwritten count in `missed_steps`, their rows in `missed_rows`. If there are bad ones among them,
        the first is returned, without a loss. What a failed dispatch has recorded is left out.
        """
        steps: list[RingStep] = []
        self.has_pending_bad, self.is_complete = False, True
        for copy in snapshot.copies if snapshot is not None else ():
            try:
                with jax.transfer_guard("allow"):
                    ledger = np.asarray(copy.ledger)
                    rows = None if copy.rows is None else [np.asarray(array) for array in copy.rows]
                    if rows is not None and copy.storage.tensors:
                        rows = [array[0] for array in rows]  # the dimension of devices
            except Exception:  # noqa: BLE001, S112 - of the dispatch; the program finds it in its results
                continue
            steps.extend(self._read(copy.storage, copy.cursor, ledger, rows))
        return steps

    def _read(
        self,
        storage: RingStorage,
        cursor: ReadCursor,
        ledger: NDArray[np.int32],
        rows: list[NDArray[Any]] | None,
    ) -> Iterator[RingStep]:
        control = ledger[0]
        updates, row_sets = int(control[LedgerColumn.UPDATES]), int(control[LedgerColumn.ROW_SETS])
        first = max(cursor.updates, updates - storage.slots)
        entries = [ledger[1 + number % storage.slots] for number in range(first, updates)]
        if first > cursor.updates:
            bad = (
                int(control[LedgerColumn.BAD_UPDATES])
                - cursor.bad
                - sum(int(entry[EntryColumn.BAD]) for entry in entries)
            )
            if bad > 0:
                yield self._overwritten(storage, cursor, first, control, rows)
            cursor.bad += bad
            missed, cursor.updates = first - cursor.updates, first
            self.missed_steps += missed
            self._number += missed
        for place, entry in enumerate(entries):
            row_set = int(entry[EntryColumn.ROW_SET])
            has_rows = row_set >= max(0, row_sets - storage.row_slots)
            if has_rows and rows is None and cursor is storage.cursor:
                storage.wants_rows, self.is_complete = True, False
                self.has_pending_bad |= any(bool(later[EntryColumn.BAD]) for later in entries[place:])
                break
            yield RingStep(
                self._number,
                bool(entry[EntryColumn.BAD]),
                bool(entry[EntryColumn.SKIPPED]),
                *self._measured(storage, row_set, row_sets, rows),
                _loss(entry, storage.loss_dtype),
                bool(entry[EntryColumn.BAD_GRADIENTS]),
                _places(storage),
            )
            cursor.updates += 1
            cursor.bad += int(entry[EntryColumn.BAD])
            self._number += 1
        if 0 <= int(control[LedgerColumn.FIRST_BAD]) < cursor.updates and cursor is storage.cursor:
            storage.resets_first_bad = True

    def _overwritten(
        self,
        storage: RingStorage,
        cursor: ReadCursor,
        first: int,
        control: NDArray[np.int32],
        rows: list[NDArray[Any]] | None,
    ) -> RingStep:
        """Return the first bad one of the updates that were overwritten; the last of them, if the ledger has the number of an earlier one."""
        number, row_set = int(control[LedgerColumn.FIRST_BAD]), int(control[LedgerColumn.FIRST_ROW_SET])
        if not cursor.updates <= number < first:
            number, row_set = first - 1, -1
        measured = self._measured(storage, row_set, int(control[LedgerColumn.ROW_SETS]), rows)
        rank = self._number + number - cursor.updates
        flags = int(control[LedgerColumn.FIRST_FLAGS])
        return RingStep(rank, True, bool(flags & 1), *measured, None, bool(flags & 2), _places(storage))

    def _measured(
        self, storage: RingStorage, row_set: int, row_sets: int, rows: list[NDArray[Any]] | None
    ) -> tuple[MeasuredRows | None, MeasuredRows | None]:
        """Return the rows of an update, if it has any that were not overwritten."""
        row_slots = storage.row_slots
        if 0 <= row_set < row_sets - row_slots:
            self.missed_rows += 1
        elif row_set >= 0 and rows is not None:
            return self._rows(storage, [array[row_set % row_slots] for array in rows])
        return None, None

    def _rows(
        self, storage: RingStorage, arrays: list[NDArray[Any]]
    ) -> tuple[MeasuredRows, MeasuredRows | None]:
        border = storage.gradient_rows
        if not storage.tensors:
            batch = statistics(_words(storage.layout, arrays))
            places = np.arange(len(batch))
            gradients, weights = (
                MeasuredRows(batch.take(places[:border])),
                MeasuredRows(batch.take(places[border:])),
            )
        else:
            rows, batch = own_rows(_words_by_device(storage, arrays), storage.tensors)
            count = int(np.searchsorted(rows, border))
            places = np.arange(len(batch))
            gradients = MeasuredRows(batch.take(places[:count]), tuple(rows[:count].tolist()))
            weights = MeasuredRows(batch.take(places[count:]), tuple((rows[count:] - border).tolist()))
        return gradients, weights if storage.has_weights else None


def _words(layout: RowLayout, arrays: Sequence[NDArray[Any]]) -> RowWords:
    remaining = list(arrays)
    narrow = remaining.pop(0) if layout.narrow else None
    wide = remaining.pop(0) if layout.wide else None
    return RowWords(narrow, wide, layout)


def _words_by_device(storage: RingStorage, arrays: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, RowWords]]:
    """Yield each device of this process, and the words of its shards."""
    devices = sorted(storage.tensors[0].sharding.addressable_devices, key=lambda device: int(device.id))
    for place, device in enumerate(devices):
        yield device, _words(storage.layout, arrays[place :: len(devices)])


def _places(storage: RingStorage) -> dict[Role, tuple[Placement, ...]]:
    """Return which part of each gradient and weight this process has measured; empty if all of them as a whole."""
    if jax.process_count() == 1 or not storage.tensors:
        return {}
    places = own_places(storage.tensors)
    gradients = [replace(place, stage="reduced") for place in places[: storage.gradient_rows]]
    return {"gradient": tuple(gradients), "weight": places[storage.gradient_rows :]}


def _loss(entry: NDArray[np.int32], dtype: np.dtype[Any] | None) -> float | None:
    if dtype is None:
        return None
    return float(np.ascontiguousarray(entry[EntryColumn.LOSS :]).view(dtype)[0])
