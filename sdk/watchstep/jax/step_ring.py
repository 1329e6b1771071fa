"""A ring of steps in device memory, for updates inside of a ``scan`` or loop, whose extra outputs cannot leave the program.

`StepRing.record` is called at trace time. The traced program then writes into a few `jax.Ref` that were created outside of the trace:

- the *ledger*, int32 of shape (slots + 1, 8). Its first row is (number of updates, number of row sets, cadence, whether the last update was bad, number of
  bad updates, then of the first bad one: number, skipped, row set; the number is -1 without one). The others are a ring of updates: (number, bad, skipped,
  row set or -1, two words of the loss, 0, 0). The first row is not overwritten: a bad update is found even if its own row is.
- rows of statistics (`watchstep.jax.device_rows`) of shape (row slots, rows, words), a ring of row sets.

Rows are computed in one branch of a ``lax.cond``: at every ``every``-th update, and at the first of consecutive bad ones. A later bad update of the
same streak has no rows, because those of the first would be overwritten before the host has read them. ``every`` is a number in the ledger, so that a change
of it compiles nothing.

The host takes a snapshot after a dispatch, which starts copies and does not wait, and reads it at a later one.

A program uses its Refs as long as it lives. Rings are therefore kept with them: a later recording of the same optimizer continues with the ring that the
compiled programs write to (`StepRing.shared`). `StepRing.check` replaces the memory of Refs that a failed dispatch has deleted, and takes Refs back
from a mesh: JAX leaves them where the last program was executed, and refuses programs on other devices.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.jax.device_rows import RowLayout, RowWords, finite, is_measurable, measure, statistics
from watchstep.updates.tensor_values import MeasuredRows

(
    _UPDATES,
    _ROW_SETS,
    _EVERY,
    _WAS_BAD,
    _BAD_UPDATES,
    _FIRST_BAD,
    _FIRST_SKIPPED,
    _FIRST_ROW_SET,
) = range(8)
"""Columns of the ledger's first row."""

_NUMBER, _BAD, _SKIPPED, _ROW_SET, _LOSS = range(5)
"""Columns of the others. The loss takes two."""

_COLUMNS = 8
_MAX_SLOTS = 4096
_MAX_STORAGES = 4
"""Number of signatures, meshes and sizes that one ring has memory for."""

_SMALL_ROWS = 2**20
"""Rows of at most so many bytes are part of every snapshot. Larger ones are copied after the ledger has shown that there are new ones."""


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
    """

    number: int
    is_bad: bool
    is_skipped: bool
    gradients: MeasuredRows | None
    weights: MeasuredRows | None
    loss: float | None


@dataclass
class _Cursor:
    """What the host has read of a storage since its memory was created.

    Attributes:
        updates: Number of updates.
        bad: Number of bad ones among them.
    """

    updates: int = 0
    bad: int = 0


@dataclass(eq=False)
class _Storage:
    """The Refs of a ring, for programs with the same tensors.

    Attributes:
        signature: Shapes and dtypes of what is recorded.
        mesh: The mesh of the context in which the Refs were created, which is part of their type.
        layout: Layout of a row set: gradients, then weights.
        gradient_rows: Number of rows of gradients.
        slots: Updates that the ledger holds.
        ledger: The ledger.
        rows: Rings of row sets.
        loss_dtype: Type of the loss, float32 or float64; None without a loss.
        every: The cadence in the ledger.
        cursor: What was read.
        wants_rows: Whether the next snapshot needs rows.
        resets_first_bad: Whether the first bad update in the ledger was read.
        is_stale: Whether the memory must be replaced before it is used.
    """

    signature: Any
    mesh: Any
    layout: RowLayout
    gradient_rows: int
    slots: int
    ledger: Any
    rows: tuple[Any, ...]
    loss_dtype: np.dtype[Any] | None
    every: int
    cursor: _Cursor = field(default_factory=_Cursor)
    wants_rows: bool = False
    resets_first_bad: bool = False
    is_stale: bool = False

    @property
    def refs(self) -> tuple[Any, ...]:
        """All Refs."""
        return self.ledger, *self.rows

    @property
    def bytes(self) -> int:
        """Size of the row sets."""
        return sum(int(np.prod(ref.shape)) * ref.dtype.itemsize for ref in self.rows)


@dataclass(frozen=True)
class _StorageCopy:
    """Copies of a storage that are on their way to the host.

    Attributes:
        storage: The storage.
        cursor: Its cursor at the time of the copy.
        ledger: The ledger.
        rows: Rings of row sets, narrow and wide as in `RowWords`, those that exist; None if they were not copied.
    """

    storage: _Storage
    cursor: _Cursor
    ledger: Any
    rows: tuple[Any, ...] | None


@dataclass(frozen=True)
class RingSnapshot:
    """Copies of a ring that are on their way to the host.

    Attributes:
        copies: A copy of each storage.
    """

    copies: tuple[_StorageCopy, ...]

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


def is_available() -> bool:
    """Return whether this version of JAX has `jax.new_ref`."""
    return hasattr(jax, "new_ref")


_rings: weakref.WeakSet[StepRing] = weakref.WeakSet()
"""Rings that programs may write to, or that have a key. Their Refs refer to them, so that they live as long as a program that uses them."""

_rings_lock = threading.Lock()


class StepRing:
    """Records the updates of one optimizer in device memory. `record` is called at trace time, all else on the training thread outside of traces."""

    def __init__(
        self,
        *,
        every: int = 100,
        slots: int = 256,
        max_slots: int = _MAX_SLOTS,
        row_slots: int = 4,
        sharding: Any = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Create a ring. Device memory is taken by the first `record`.

        Args:
            every: Updates from one with rows to the next; 0 gives rows to bad ones only.
            slots: Updates that the ring holds, at least: those of the dispatches between two snapshots.
            max_slots: Updates that it holds at most, in a scan of more than ``slots``.
            row_slots: Row sets that the ring holds.
            sharding: A replicated `jax.sharding.Sharding`, for rings that are used by programs over its devices only.
            note: Called at trace time with the reason where an update is not observed.

        Raises:
            ConfigError: A number is out of range, or JAX has no `jax.new_ref`.
        """
        if every < 0 or slots < 1 or row_slots < 1:
            raise ConfigError(
                f"StepRing(every={every}, slots={slots}, row_slots={row_slots})",
                "every is 0 or more, slots and row_slots are at least 1",
            )
        if not is_available():
            raise ConfigError(f"jax {jax.__version__} has no jax.new_ref", "use jax 0.8 or later")
        self._every = every
        self._slots, self._max_slots, self._row_slots = slots, max(slots, max_slots), row_slots
        self._sharding = sharding
        self._note = note or (lambda _: None)
        self._storages: list[_Storage] = []
        self.key: Hashable = None
        self._owner: weakref.ref[Any] | None = None
        self._number = 0
        self.has_pending_bad = False
        self.missed_steps = 0
        self.missed_rows = 0

    @classmethod
    def shared(
        cls, key: Hashable, owner: object, *, every: int, row_slots: int, note: Callable[[str], None]
    ) -> StepRing:
        """Return the ring that compiled programs of this process already use for an optimizer, or a new one.

        Args:
            key: What identifies the optimizer's parameters in this process; None for a ring of its own.
            owner: Who reads it. A ring has one owner until `release`, or until the owner is collected as garbage. Its numbers start from 0 for each.
            every: As for a new ring.
            row_slots: As for a new ring. Those of an existing one stay as they are.
            note: As for a new ring.
        """
        with _rings_lock:
            unread = [
                ring for ring in tuple(_rings) if key is not None and ring.key == key and not ring.is_owned
            ]
            ring = unread[0] if unread else cls(every=every, row_slots=row_slots, note=note)
            ring.key, ring._owner = key, weakref.ref(owner)  # noqa: SLF001 - its own class
            if key is not None:
                _rings.add(ring)
        ring._restart(every, note)  # noqa: SLF001 - as above
        return ring

    def release(self) -> None:
        """Leave the ring to another owner."""
        self._owner = None

    @property
    def is_owned(self) -> bool:
        """Whether somebody reads the ring."""
        return self._owner is not None and self._owner() is not None

    @property
    def is_traced(self) -> bool:
        """Whether a program has been traced that uses the ring."""
        return bool(self._storages)

    def _restart(self, every: int, note: Callable[[str], None]) -> None:
        """Forget what was recorded."""
        self._every, self._note = every, note
        self._number = self.missed_steps = self.missed_rows = 0
        self.has_pending_bad = False
        for storage in self._storages:
            storage.is_stale = True

    @property
    def every(self) -> int:
        """Updates from one with rows to the next. A change takes effect with the next `snapshot`."""
        return self._every

    @every.setter
    def every(self, every: int) -> None:
        if every < 0:
            raise ConfigError(f"every={every} of a ring of steps", "use 0 or more")
        self._every = every

    def record(
        self,
        gradients: Sequence[Any],
        weights: Sequence[Any] = (),
        loss: Any = None,
        *,
        stacked: Sequence[bool] | None = None,
        emitted: Any = None,
        skipped: Any = None,
    ) -> bool:
        """Add operations to the program that is being traced, which record one update each time they run. Never raises.

        Args:
            gradients: Gradient of each parameter.
            weights: Each parameter before the update; empty to leave them out.
            loss: The loss, real and of one element.
            stacked: Whether a parameter gets a row for each index of its first dimension. Default: none does.
            emitted: Whether this is an update, bool of shape (); it is not counted otherwise. Default: it is.
            skipped: Whether the optimizer leaves the update out, bool of shape (). Default: it does not.

        Returns:
            Whether the update is recorded. Otherwise the program is unchanged, and ``note`` was called with the reason.
        """
        try:
            obstacle, length = _surroundings()
            if obstacle is not None:
                self._note(f"an update inside of {obstacle} is not observed")
                return False
            flags = (False,) * len(gradients) if stacked is None else tuple(stacked)
            update = _TracedStep.of(gradients, weights, loss, flags)
            storage = self._storage_of(update, length)
            if storage is None:
                self._note("an update of other tensors than before is not observed")
                return False
            self._trace(storage, update, emitted, skipped)
        except Exception as error:  # noqa: BLE001 - never into the program
            self._note(f"an update is not observed: {type(error).__name__}: {error}")
            return False
        return True

    def _storage_of(self, update: _TracedStep, length: int) -> _Storage | None:
        """Return the Refs, which are created for the first update of its kind; None for an update of other tensors, or one kind too many.

        Args:
            update: The update.
            length: Number of updates in a dispatch, as far as it is found at trace time.
        """
        if self._storages and self._storages[0].signature[0][0] != update.signature[0][0]:
            return None
        mesh = _context_mesh()
        slots = max(self._slots, min(1 << (length - 1).bit_length(), self._max_slots))
        alike = [item for item in self._storages if (item.signature, item.mesh) == (update.signature, mesh)]
        large = [storage for storage in alike if storage.slots >= slots]
        if large or len(self._storages) >= _MAX_STORAGES:
            return max(large or alike, key=lambda storage: storage.slots, default=None)
        gradients, whole = (
            update.shapes(update.gradients),
            update.shapes((*update.gradients, *update.weights)),
        )
        arrays = [self._fresh_ledger(slots)]
        arrays += [
            np.zeros((self._row_slots, *words.shape), words.dtype)
            for words in (whole.narrow, whole.wide)
            if words is not None
        ]
        with jax.ensure_compile_time_eval():
            refs = [self._new_ref(array) for array in arrays]
        if any(_buffer_of(ref) is None for ref in refs):
            # Without access to its memory, one failed dispatch would break all later ones.
            raise ConfigError(f"jax {jax.__version__} has other Refs", "use another version of jax")
        storage = _Storage(
            update.signature,
            mesh,
            whole.layout,
            gradients.layout.rows,
            slots,
            refs[0],
            tuple(refs[1:]),
            update.loss_dtype,
            self._every,
        )
        self._storages.append(storage)
        with _rings_lock:
            _rings.add(self)
        return storage

    def _fresh_ledger(self, slots: int) -> NDArray[Any]:
        ledger = np.full((slots + 1, _COLUMNS), -1, np.int32)
        ledger[0] = (0, 0, self._every, 0, 0, -1, 0, -1)
        return ledger

    def _new_ref(self, array: NDArray[Any]) -> Any:
        if self._sharding is not None:
            ref = jax.new_ref(jax.device_put(array, self._sharding))
        else:
            _respect_uncommitted_marks()
            ref = jax.new_ref(jnp.asarray(array))
            setattr(ref, _UNCOMMITTED, True)
        ref._watchstep_ring = self  # noqa: SLF001 - the ring lives as long as a program that writes to it
        return ref

    def check(self) -> bool:
        """Make the Refs usable by the next dispatch, on any device. To be called before each. Never raises, and does not wait for the device.

        Memory that a failed dispatch has deleted, or that has its error, is replaced. Memory on several devices is taken back to one.

        Returns:
            Whether they are usable. Otherwise programs that use them must not be dispatched.
        """
        return all([self._check(storage) for storage in self._storages])  # noqa: C419 - each of them

    def repair(self) -> bool:
        """Replace memory that a failed dispatch has deleted, as `check`. The numbers of later updates follow those that were read, or are in snapshots."""
        return self.check()

    def _check(self, storage: _Storage) -> bool:
        try:
            buffers = [_buffer_of(ref) for ref in storage.refs]
            if any(buffer is None for buffer in buffers):
                return False
            if storage.is_stale or any(map(_has_failed, buffers)):
                self._replace(storage)
            elif self._sharding is None:
                for ref, buffer in zip(storage.refs, buffers, strict=True):
                    if buffer.sharding.num_devices > 1:
                        _set_buffer(ref, buffer.addressable_shards[0].data)
        except Exception as error:  # noqa: BLE001 - never into the program
            storage.is_stale = True
            self._note(f"a ring of steps cannot be repaired: {type(error).__name__}: {error}")
            return False
        return True

    def _replace(self, storage: _Storage) -> None:
        """Give new memory to the Refs. An interrupt leaves them stale."""
        storage.is_stale = True
        arrays = [
            self._fresh_ledger(storage.slots),
            *(np.zeros(ref.shape, ref.dtype) for ref in storage.rows),
        ]
        with jax.transfer_guard("allow"):
            for ref, array in zip(storage.refs, arrays, strict=True):
                _set_buffer(ref, self._memory(array))
        storage.every = self._every
        storage.cursor = _Cursor()
        storage.wants_rows = storage.resets_first_bad = False
        storage.is_stale = False

    def _memory(self, array: NDArray[Any]) -> Any:
        if self._sharding is not None:
            return jax.device_put(array, self._sharding)
        if array.dtype.itemsize > 4 and not jax.config.jax_enable_x64:
            with jax.experimental.enable_x64():
                return jnp.array(array)
        return jnp.array(array)

    def _trace(self, storage: _Storage, update: _TracedStep, emitted: Any, skipped: Any) -> None:
        control = storage.ledger[0]
        number, every = control[_UPDATES], control[_EVERY]
        counts = jnp.asarray(True if emitted is None else emitted).reshape(())
        is_bad = jnp.logical_not(finite((*update.gradients, *update.losses)))
        is_first_bad = is_bad & (control[_WAS_BAD] == 0)
        is_due = (every > 0) & (number % jnp.maximum(every, 1) == 0)
        has_rows = counts & (is_due | is_first_bad) & bool(storage.rows)
        row_sets = control[_ROW_SETS]

        row_slots = storage.rows[0].shape[0] if storage.rows else 1
        is_skipped = jnp.asarray(False if skipped is None else skipped).reshape(()).astype(np.int32)
        row_set = jnp.where(has_rows, row_sets, -1)

        def write_rows() -> None:
            words = measure((*update.gradients, *update.weights), stacked=update.stacked_of_all)
            arrays = [array for array in (words.narrow, words.wide) if array is not None]
            for ref, array in zip(storage.rows, arrays, strict=True):
                ref[row_sets % row_slots] = _replicated(array)

        def write_update() -> None:
            storage.ledger[1 + number % storage.slots] = jnp.stack(
                [
                    number,
                    is_bad.astype(np.int32),
                    is_skipped,
                    row_set,
                    *update.loss_words,
                    jnp.zeros_like(number),
                    jnp.zeros_like(number),
                ]
            )
            is_noted = is_bad & (control[_FIRST_BAD] < 0)
            storage.ledger[0] = jnp.stack(
                [
                    number + 1,
                    row_sets + has_rows,
                    every,
                    is_bad.astype(np.int32),
                    control[_BAD_UPDATES] + is_bad,
                    jnp.where(is_noted, number, control[_FIRST_BAD]),
                    jnp.where(is_noted, is_skipped, control[_FIRST_SKIPPED]),
                    jnp.where(is_noted, row_set, control[_FIRST_ROW_SET]),
                ]
            )

        if storage.rows:
            lax.cond(has_rows, write_rows, lambda: None)
        if emitted is None:
            write_update()
        else:
            lax.cond(counts, write_update, lambda: None)

    def snapshot(self, *, with_rows: bool = False) -> RingSnapshot | None:
        """Start a copy to the host after a dispatch, without waiting; None before anything was traced. Never raises.

        Args:
            with_rows: Copy rows even if they are large and none are known to be new: for the last snapshot of a program.
        """
        copies = []
        for storage in self._storages:
            try:
                if self._check(storage):
                    copies.append(self._copy(storage, with_rows=with_rows))
            except Exception as error:  # noqa: BLE001 - never into the program
                self._note(f"a ring of steps cannot be copied: {type(error).__name__}: {error}")
        return RingSnapshot(tuple(copies)) if copies else None

    def _copy(self, storage: _Storage, *, with_rows: bool) -> _StorageCopy:
        with jax.transfer_guard("allow"):
            if self._every != storage.every:
                storage.every = self._every
                self._write(storage, _EVERY, self._every)
            ledger, rows = _copy_of(storage.ledger), None
            if with_rows or storage.wants_rows or storage.bytes <= _SMALL_ROWS:
                rows = tuple(_copy_of(ref) for ref in storage.rows)
                storage.wants_rows = False
            if storage.resets_first_bad:
                storage.resets_first_bad = False
                self._write(storage, _FIRST_BAD, -1)
            for array in (ledger, *(rows or ())):
                array.copy_to_host_async()
        return _StorageCopy(storage, storage.cursor, ledger, rows)

    def _write(self, storage: _Storage, column: int, value: int) -> None:
        """Change a number of the ledger. A Ref whose type has a mesh with explicit axes admits that in programs over the mesh only."""
        try:
            storage.ledger[0, column] = np.int32(value)
        except Exception as error:  # noqa: BLE001 - never into the program
            self._note(f"a ring of steps cannot be changed: {type(error).__name__}: {error}")

    def read(self, snapshot: RingSnapshot | None) -> list[RingStep]:
        """Return the updates of a snapshot that were not read before, in their order; none of None. Waits for the device unless `RingSnapshot.is_ready`.

        An update whose rows are not part of the snapshot, and those after it, are returned by the read of a later snapshot; `has_pending_bad` is whether a
        bad one is among them. Updates that were overwritten count in `missed_steps`, their rows in `missed_rows`. If there are bad ones among them,
        the first is returned, without a loss. What a failed dispatch has recorded is left out.
        """
        steps: list[RingStep] = []
        self.has_pending_bad = False
        for copy in snapshot.copies if snapshot is not None else ():
            try:
                with jax.transfer_guard("allow"):
                    ledger = np.asarray(copy.ledger)
                    rows = None if copy.rows is None else [np.asarray(array) for array in copy.rows]
            except Exception:  # noqa: BLE001, S112 - of the dispatch; the program finds it in its results
                continue
            steps.extend(self._read(copy.storage, copy.cursor, ledger, rows))
        return steps

    def _read(
        self,
        storage: _Storage,
        cursor: _Cursor,
        ledger: NDArray[np.int32],
        rows: list[NDArray[Any]] | None,
    ) -> Iterator[RingStep]:
        control = ledger[0]
        updates, row_sets = int(control[_UPDATES]), int(control[_ROW_SETS])
        first = max(cursor.updates, updates - storage.slots)
        entries = [ledger[1 + number % storage.slots] for number in range(first, updates)]
        if first > cursor.updates:
            bad = int(control[_BAD_UPDATES]) - cursor.bad - sum(int(entry[_BAD]) for entry in entries)
            if bad > 0:
                yield self._overwritten(storage, cursor, first, control, rows)
            cursor.bad += bad
            missed, cursor.updates = first - cursor.updates, first
            self.missed_steps += missed
            self._number += missed
        for place, entry in enumerate(entries):
            row_set = int(entry[_ROW_SET])
            has_rows = row_set >= max(0, row_sets - self._row_slots_of(storage))
            if has_rows and rows is None and cursor is storage.cursor:
                storage.wants_rows = True
                self.has_pending_bad |= any(bool(later[_BAD]) for later in entries[place:])
                break
            yield RingStep(
                self._number,
                bool(entry[_BAD]),
                bool(entry[_SKIPPED]),
                *self._measured(storage, row_set, row_sets, rows),
                _loss(entry, storage.loss_dtype),
            )
            cursor.updates += 1
            cursor.bad += int(entry[_BAD])
            self._number += 1
        if 0 <= int(control[_FIRST_BAD]) < cursor.updates and cursor is storage.cursor:
            storage.resets_first_bad = True

    def _overwritten(
        self,
        storage: _Storage,
        cursor: _Cursor,
        first: int,
        control: NDArray[np.int32],
        rows: list[NDArray[Any]] | None,
    ) -> RingStep:
        """Return the first bad one of the updates that were overwritten; the last of them, if the ledger has the number of an earlier one."""
        number, row_set = int(control[_FIRST_BAD]), int(control[_FIRST_ROW_SET])
        if not cursor.updates <= number < first:
            number, row_set = first - 1, -1
        measured = self._measured(storage, row_set, int(control[_ROW_SETS]), rows)
        rank = self._number + number - cursor.updates
        return RingStep(rank, True, bool(control[_FIRST_SKIPPED]), *measured, None)

    def _measured(
        self, storage: _Storage, row_set: int, row_sets: int, rows: list[NDArray[Any]] | None
    ) -> tuple[MeasuredRows | None, MeasuredRows | None]:
        """Return the rows of an update, if it has any that were not overwritten."""
        row_slots = self._row_slots_of(storage)
        if 0 <= row_set < row_sets - row_slots:
            self.missed_rows += 1
        elif row_set >= 0 and rows is not None:
            return self._rows(storage, [array[row_set % row_slots] for array in rows])
        return None, None

    def _row_slots_of(self, storage: _Storage) -> int:
        return int(storage.rows[0].shape[0]) if storage.rows else self._row_slots

    def _rows(
        self, storage: _Storage, arrays: list[NDArray[Any]]
    ) -> tuple[MeasuredRows, MeasuredRows | None]:
        remaining = list(arrays)
        narrow = remaining.pop(0) if storage.layout.narrow else None
        wide = remaining.pop(0) if storage.layout.wide else None
        batch = statistics(RowWords(narrow, wide, storage.layout))
        places, border = np.arange(len(batch)), storage.gradient_rows
        weights = MeasuredRows(batch.take(places[border:])) if border < len(batch) else None
        return MeasuredRows(batch.take(places[:border])), weights


def check_rings() -> bool:
    """Make all rings of the process usable by the next dispatch, as `StepRing.check`, also those that nobody reads any more."""
    with _rings_lock:
        rings = tuple(_rings)
    return all([ring.check() for ring in rings])  # noqa: C419 - each of them


@dataclass(frozen=True)
class _TracedStep:
    """The tensors of one update, at trace time.

    Attributes:
        gradients: Gradients that can be measured.
        weights: Weights that can be measured.
        stacked_of_all: Whether each of both is stacked.
        losses: The loss, of shape (), if there is one.
    """

    gradients: tuple[Any, ...]
    weights: tuple[Any, ...]
    stacked_of_all: tuple[bool, ...]
    losses: tuple[Any, ...]

    @classmethod
    def of(
        cls, gradients: Sequence[Any], weights: Sequence[Any], loss: Any, stacked: tuple[bool, ...]
    ) -> _TracedStep:
        """Convert to arrays.

        Raises:
            ConfigError: A tensor cannot be measured, or the loss is no number.
        """
        if weights and len(weights) != len(gradients):
            raise ConfigError(
                f"{len(weights)} weights and {len(gradients)} gradients", "pass one of each per parameter"
            )
        arrays = [
            tuple(lax.stop_gradient(jnp.asarray(array)) for array in role) for role in (gradients, weights)
        ]
        for array in (*arrays[0], *arrays[1]):
            if not is_measurable(array.dtype):
                raise ConfigError(f"an array of dtype {array.dtype} cannot be measured", "leave it out")
        losses: tuple[Any, ...] = ()
        if loss is not None:
            number = lax.stop_gradient(jnp.asarray(loss))
            if number.size != 1 or jnp.issubdtype(number.dtype, jnp.complexfloating):
                raise ConfigError(
                    f"a loss of shape {number.shape} and dtype {number.dtype}", "pass one real number"
                )
            wide = np.float64 if number.dtype == np.float64 else np.float32
            losses = (number.reshape(()).astype(wide),)
        flags = stacked + stacked if weights else stacked
        return cls(arrays[0], arrays[1], flags, losses)

    @property
    def loss_dtype(self) -> np.dtype[Any] | None:
        """Type of the loss."""
        return np.dtype(self.losses[0].dtype) if self.losses else None

    @property
    def loss_words(self) -> Iterator[Any]:
        """Bits of the loss as two int32 of shape ()."""
        words = [lax.bitcast_convert_type(loss, np.int32).reshape(-1) for loss in self.losses]
        padded = jnp.concatenate([*words, jnp.zeros(2, np.int32)])
        return iter((padded[0], padded[1]))

    @functools.cached_property
    def signature(self) -> Any:
        """Return what two updates of the same storage have in common."""
        shapes = tuple(
            tuple((array.shape, np.dtype(array.dtype).name) for array in role)
            for role in (self.gradients, self.weights)
        )
        return shapes, self.stacked_of_all, self.loss_dtype

    def shapes(self, tensors: tuple[Any, ...]) -> RowWords:
        """Return the shapes of the words of some tensors."""
        flags = self.stacked_of_all[: len(tensors)]
        structs = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
        words: RowWords = jax.eval_shape(functools.partial(measure, stacked=flags), structs)
        return words


def _loss(entry: NDArray[np.int32], dtype: np.dtype[Any] | None) -> float | None:
    if dtype is None:
        return None
    return float(np.ascontiguousarray(entry[_LOSS:]).view(dtype)[0])


_UNCOMMITTED = "_watchstep_uncommitted"


def _respect_uncommitted_marks() -> None:
    """Let the Refs of rings without a sharding be uncommitted, as arrays are that were not placed on a device.

    JAX states that every Ref is committed. A program with such a Ref returns committed arrays, and compiles a second time when they are
    its arguments; a program over several devices raises. Refs without the mark are as before.
    """
    kind: Any = jax.Ref
    if not hasattr(kind, _UNCOMMITTED) and isinstance(kind.__dict__.get("committed"), property):
        setattr(kind, _UNCOMMITTED, False)
        kind.committed = kind._committed = property(_is_committed)  # noqa: SLF001


def _is_committed(ref: Any) -> bool:
    return not getattr(ref, _UNCOMMITTED) or ref.sharding.num_devices > 1


_OBSTACLES = {
    "jax._src.interpreters.batching": "vmap",
    "jax._src.pmap": "pmap",
    "jax._src.shard_map": "shard_map",
    "jax._src.export._export": "export",
    "jax._src.interpreters.ad": "a differentiated function",
    "jax._src.ad_checkpoint": "a differentiated function",
}
"""Modules of JAX that trace programs in which a closed-over Ref may raise."""


_LOOPS = "jax._src.lax.control_flow.loops"
_SCANS = frozenset({"scan", "scan3", "scan_nocarry"})


def _surroundings() -> tuple[str | None, int]:
    """Return the transformation that traces the current code and admits no closed-over Ref, and the number of iterations of the scans around it.

    They are found among the callers: JAX has no public way, and a ``jit`` inside of a ``vmap`` is traced without its batch dimension.
    """
    frame = sys._getframe()  # noqa: SLF001 - its public form reads source files
    length = 1
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in _OBSTACLES:
            return _OBSTACLES[name], length
        if name == _LOOPS and frame.f_code.co_name in _SCANS:
            own = frame.f_locals.get("length")
            length *= own if isinstance(own, int) and own > 0 else 1
        frame = frame.f_back  # type: ignore[assignment]
    return None, length


def _context_mesh() -> Any:
    """Return the mesh of the context, which is part of the type of a Ref; None if this JAX has none."""
    get = getattr(jax.sharding, "get_abstract_mesh", None)
    return None if get is None else get()


def _replicated(array: Any) -> Any:
    """Return an array of a type without a sharding: under a mesh with explicit axes, those of sharded tensors have one."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    if sharding is None or not any(axis is not None for axis in sharding.spec):
        return array
    spec = jax.sharding.PartitionSpec(*(None,) * array.ndim)
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(sharding.mesh, spec))


def _buffer_of(ref: Any) -> Any:
    """Return the array that is the memory of a Ref; None if this JAX has another way."""
    buffer = getattr(getattr(ref, "_refs", None), "_buf", None)
    return buffer if isinstance(buffer, jax.Array) else None


def _set_buffer(ref: Any, array: Any) -> None:
    """Let an array be the memory of a Ref.

    Raises:
        ConfigError: It has another shape or dtype.
    """
    if (array.shape, array.dtype) != (ref.shape, ref.dtype):
        raise ConfigError(f"memory of {array.shape} {array.dtype} for a Ref of {ref.shape} {ref.dtype}", "")
    ref._refs._buf = array  # noqa: SLF001 - JAX does the same after each dispatch


def _copy_of(ref: Any) -> Any:
    """Start a copy of the memory of a Ref."""
    sharding = getattr(jax.typeof(ref), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return ref[...]
    buffer = _buffer_of(ref)  # the Ref itself can be read in programs over the mesh of its type only
    return jax.device_put(buffer, buffer.sharding, may_alias=False)


def _has_failed(buffer: Any) -> bool:
    """Return whether an array was deleted, or the dispatch failed that has computed it. Does not wait for one that is being computed."""
    try:
        if buffer.is_deleted():
            return True
        if buffer.is_ready():
            jax.block_until_ready(buffer)
    except Exception:  # noqa: BLE001 - the error of the dispatch
        return True
    return False
