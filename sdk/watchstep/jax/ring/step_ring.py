"""A ring of steps in device memory, for updates inside of a ``scan`` or loop, whose extra outputs cannot leave the program.

`StepRing.record` is called at trace time. The traced program then writes into a few `jax.Ref` that were created outside of the trace
(`watchstep.jax.ring.ring_storage`). The host takes a snapshot after a dispatch, which starts copies and does not wait, and reads it at a later one.

A program uses its Refs as long as it lives. Rings are therefore kept with them: a later recording of the same optimizer continues with the ring that the
compiled programs write to (`StepRing.shared`). `StepRing.check` replaces the memory of Refs that a failed dispatch has deleted, and takes Refs back
from a mesh: JAX leaves them where the last program was executed, and refuses programs on other devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from watchstep.errors import ConfigError
from watchstep.jax.internals import has_rings, surroundings
from watchstep.jax.ring import ring_steps
from watchstep.jax.ring.ref_memory import (
    buffer_of,
    context_mesh,
    copy_of,
    has_failed,
    local_copies_of,
    new_memory,
    new_ref,
    set_buffer,
    write_locally,
)
from watchstep.jax.ring.ring_snapshots import RingSnapshot, RingStep, SnapshotReader, StorageCopy
from watchstep.jax.ring.ring_steps import TracedStep
from watchstep.jax.ring.ring_storage import LedgerColumn, ReadCursor, RingStorage, fresh_ledger, shardings_on

_MAX_SLOTS = 4096
_MAX_STORAGES = 4
"""Number of signatures, meshes and sizes that one ring has memory for."""

_SMALL_ROWS = 2**20
"""Rows of at most so many bytes are part of every snapshot. Larger ones are copied after the ledger has shown that there are new ones."""

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
            ConfigError: A number is out of range, or this JAX lacks what rings need.
        """
        if every < 0 or slots < 1 or row_slots < 1:
            raise ConfigError(
                f"StepRing(every={every}, slots={slots}, row_slots={row_slots})",
                "every is 0 or more, slots and row_slots are at least 1",
            )
        if not has_rings():
            raise ConfigError(
                f"jax {jax.__version__} has no Refs as rings need them", "use another version of jax"
            )
        self._every = every
        self._slots, self._max_slots, self._row_slots = slots, max(slots, max_slots), row_slots
        self._sharding = sharding
        self._note = note or (lambda _: None)
        self._storages: list[RingStorage] = []
        self.key: Hashable = None
        self._owner: weakref.ref[Any] | None = None
        self._reader = SnapshotReader()

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
        self._reader = SnapshotReader()
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

    def record(  # noqa: PLR0913 - what an update consists of
        self,
        gradients: Sequence[Any],
        weights: Sequence[Any] = (),
        loss: Any = None,
        *,
        stacked: Sequence[bool] | None = None,
        emitted: Any = None,
        skipped: Any = None,
        shardings: Sequence[NamedSharding] | None = None,
    ) -> bool:
        """Add operations to the program that is being traced, which record one update each time they run. Never raises.

        Args:
            gradients: Gradient of each parameter.
            weights: Each parameter before the update; empty to leave them out.
            loss: The loss, real and of one element.
            stacked: Whether a parameter gets a row for each index of its first dimension. Default: none does.
            emitted: Whether this is an update, bool of shape (); it is not counted otherwise. Default: it is.
            skipped: Whether the optimizer leaves the update out, bool of shape (). Default: it does not.
            shardings: How each gradient and weight is distributed over the devices of one mesh: each device measures its own shards. Default:
                whole arrays are measured.

        Returns:
            Whether the update is recorded. Otherwise the program is unchanged, and ``note`` was called with the reason.
        """
        try:
            obstacle, length = surroundings()
            if obstacle is not None:
                self._note(f"an update inside of {obstacle} is not observed")
                return False
            flags = (False,) * len(gradients) if stacked is None else tuple(stacked)
            update = TracedStep.of(gradients, weights, loss, flags, tuple(shardings or ()))
            storage = self._storage_of(update, length)
            if storage is None:
                self._note("an update of other tensors than before is not observed")
                return False
            ring_steps.write(storage, update, emitted, skipped)
        except Exception as error:  # noqa: BLE001 - never into the program
            self._note(f"an update is not observed: {type(error).__name__}: {error}")
            return False
        return True

    def _storage_of(self, update: TracedStep, length: int) -> RingStorage | None:
        """Return the Refs, which are created for the first update of its kind; None for an update of other tensors, or one kind too many.

        Args:
            update: The update.
            length: Number of updates in a dispatch, as far as it is found at trace time.
        """
        if self._storages and self._storages[0].signature[0][0] != update.signature[0][0]:
            return None
        mesh = context_mesh()
        slots = max(self._slots, min(1 << (length - 1).bit_length(), self._max_slots))
        alike = [item for item in self._storages if (item.signature, item.mesh) == (update.signature, mesh)]
        large = [storage for storage in alike if storage.slots >= slots]
        if large or len(self._storages) >= _MAX_STORAGES:
            return max(large or alike, key=lambda storage: storage.slots, default=None)
        words = update.shapes
        arrays = [fresh_ledger(slots, self._every)]
        arrays += [
            np.zeros(self._rows_shape(array.shape, update), array.dtype)
            for array in (words.narrow, words.wide)
            if array is not None
        ]
        shardings: tuple[Any, ...] = (self._sharding,) * len(arrays)
        if update.shardings:
            shardings = shardings_on(update.shardings[0].mesh, len(arrays) - 1)
        with jax.ensure_compile_time_eval():
            refs = [self._new_ref(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
        if any(buffer_of(ref) is None for ref in refs):
            # Without access to its memory, one failed dispatch would break all later ones.
            raise ConfigError(f"jax {jax.__version__} has other Refs", "use another version of jax")
        storage = RingStorage(
            update.signature,
            mesh,
            words.layout,
            update.gradient_rows,
            bool(update.weights),
            slots,
            refs[0],
            tuple(refs[1:]),
            update.loss_dtype,
            self._every,
            tensors=update.tensors,
        )
        self._storages.append(storage)
        with _rings_lock:
            _rings.add(self)
        return storage

    def _rows_shape(self, shape: tuple[int, ...], update: TracedStep) -> tuple[int, ...]:
        """Return the shape of a ring of row sets, after the dimension of devices if each has its own."""
        if update.shardings:
            return shape[0], self._row_slots, *shape[1:]
        return self._row_slots, *shape

    def _new_ref(self, array: Any, sharding: Any) -> Any:
        ref = new_ref(array, sharding)
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

    def _check(self, storage: RingStorage) -> bool:
        try:
            buffers = [buffer_of(ref) for ref in storage.refs]
            if any(buffer is None for buffer in buffers):
                return False
            if storage.is_stale or any(map(has_failed, buffers)):
                self._replace(storage)
            elif self._sharding is None and not storage.tensors:
                for ref, buffer in zip(storage.refs, buffers, strict=True):
                    if buffer.sharding.num_devices > 1:
                        set_buffer(ref, buffer.addressable_shards[0].data)
        except Exception as error:  # noqa: BLE001 - never into the program
            storage.is_stale = True
            self._note(f"a ring of steps cannot be repaired: {type(error).__name__}: {error}")
            return False
        return True

    def _replace(self, storage: RingStorage) -> None:
        """Give new memory to the Refs. An interrupt leaves them stale."""
        storage.is_stale = True
        arrays = [
            fresh_ledger(storage.slots, self._every),
            *(np.zeros(ref.shape, ref.dtype) for ref in storage.rows),
        ]
        with jax.transfer_guard("allow"):
            for ref, array, sharding in zip(storage.refs, arrays, storage.shardings, strict=True):
                set_buffer(ref, new_memory(array, sharding or self._sharding))
        storage.every = self._every
        storage.cursor = ReadCursor()
        storage.wants_rows = storage.resets_first_bad = False
        storage.is_stale = False

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

    def _copy(self, storage: RingStorage, *, with_rows: bool) -> StorageCopy:
        with jax.transfer_guard("allow"):
            if self._every != storage.every:
                storage.every = self._every
                self._write(storage, LedgerColumn.EVERY, self._every)
            ledger, rows = self._ledger_copy(storage), None
            if with_rows or storage.wants_rows or storage.bytes <= _SMALL_ROWS:
                rows = self._row_copies(storage)
                storage.wants_rows = False
            if storage.resets_first_bad:
                storage.resets_first_bad = False
                self._write(storage, LedgerColumn.FIRST_BAD, -1)
            for array in (ledger, *(rows or ())):
                array.copy_to_host_async()
        return StorageCopy(storage, storage.cursor, ledger, rows)

    def _ledger_copy(self, storage: RingStorage) -> Any:
        return local_copies_of(storage.ledger)[0] if storage.tensors else copy_of(storage.ledger)

    def _row_copies(self, storage: RingStorage) -> tuple[Any, ...]:
        if not storage.tensors:
            return tuple(copy_of(ref) for ref in storage.rows)
        return tuple(copy for ref in storage.rows for copy in local_copies_of(ref))

    def _write(self, storage: RingStorage, column: int, value: int) -> None:
        """Change a number of the ledger. A Ref whose type has a mesh with explicit axes admits that in programs over the mesh only."""
        try:
            if storage.tensors:
                write_locally(storage.ledger, (0, column), np.int32(value))
            else:
                storage.ledger[0, column] = np.int32(value)
        except Exception as error:  # noqa: BLE001 - never into the program
            self._note(f"a ring of steps cannot be changed: {type(error).__name__}: {error}")

    def read(self, snapshot: RingSnapshot | None) -> list[RingStep]:
        """Return the updates of a snapshot that were not read before, in their order; none of None. Waits for the device unless `RingSnapshot.is_ready`.

        An update whose rows are not part of the snapshot, and those after it, are returned by the read of a later snapshot; `has_pending_bad` is whether a
        bad one is among them. Updates that were overwritten count in `missed_steps`, their rows in `missed_rows`. If there are bad ones among them,
        the first is returned, without a loss. What a failed dispatch has recorded is left out.
        """
        return self._reader.read(snapshot)

    @property
    def has_pending_bad(self) -> bool:
        """Whether a bad update is among those that a later snapshot returns."""
        return self._reader.has_pending_bad

    @property
    def is_complete(self) -> bool:
        """Whether the last read has returned all updates of its snapshot."""
        return self._reader.is_complete

    @property
    def missed_steps(self) -> int:
        """Number of updates that were overwritten before they were read."""
        return self._reader.missed_steps

    @property
    def missed_rows(self) -> int:
        """Number of updates whose rows were overwritten before they were read."""
        return self._reader.missed_rows


def check_rings() -> bool:
    """Make all rings of the process usable by the next dispatch, as `StepRing.check`, also those that nobody reads any more."""
    with _rings_lock:
        rings = tuple(_rings)
    return all([ring.check() for ring in rings])  # noqa: C419 - each of them
