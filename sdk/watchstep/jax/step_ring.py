"""A ring of steps in device memory, for updates inside of a ``scan`` or loop, whose extra outputs cannot leave the program.

`StepRing.record` is called at trace time. The traced program then writes into a few `jax.Ref` that were created outside of the trace:

- the *ledger*, int32 of shape (slots + 1, 6). Its first row is (number of updates, number of row sets, cadence, whether the last update was bad, 0, 0).
  The others are a ring of updates: (number, bad, skipped, row set or -1, two words of the loss).
- rows of statistics (`watchstep.jax.device_rows`) of shape (row slots, rows, words), a ring of row sets.

Rows are computed in one branch of a ``lax.cond``: at every ``every``-th update, and at the first of consecutive bad ones. A later bad update of the
same streak has no rows, because those of the first would be overwritten before the host has read them. ``every`` is a number in the ledger, so that a change
of it compiles nothing.

The host takes a snapshot after a dispatch, which starts copies and does not wait, and reads it at a later one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.jax.device_rows import RowLayout, RowWords, finite, is_measurable, measure, statistics
from watchstep.updates.tensor_values import MeasuredRows

_UPDATES, _ROW_SETS, _EVERY, _WAS_BAD = range(4)
"""Columns of the ledger's first row."""

_NUMBER, _BAD, _SKIPPED, _ROW_SET, _LOSS = range(5)
"""Columns of the others. The loss takes two."""

_COLUMNS = 6
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


@dataclass(frozen=True)
class RingSnapshot:
    """Copies of a ring that are on their way to the host.

    Attributes:
        ledger: The ledger.
        rows: Rings of row sets, narrow and wide as in `RowWords`, those that exist; None if they were not copied.
    """

    ledger: Any
    rows: tuple[Any, ...] | None

    @property
    def is_ready(self) -> bool:
        """Whether the device has computed the copies, so that reading does not wait for it."""
        return all(array.is_ready() for array in (self.ledger, *(self.rows or ())))


@dataclass(frozen=True)
class _Storage:
    """The Refs of a ring.

    Attributes:
        signature: Shapes and dtypes of what is recorded.
        layout: Layout of a row set: gradients, then weights.
        gradient_rows: Number of rows of gradients.
        ledger: The ledger.
        rows: Rings of row sets.
        loss_dtype: Type of the loss, float32 or float64; None without a loss.
    """

    signature: Any
    layout: RowLayout
    gradient_rows: int
    ledger: Any
    rows: tuple[Any, ...]
    loss_dtype: np.dtype[Any] | None

    @property
    def bytes(self) -> int:
        """Size of the row sets."""
        return sum(int(np.prod(ref.shape)) * ref.dtype.itemsize for ref in self.rows)


def is_available() -> bool:
    """Return whether this version of JAX has `jax.new_ref`."""
    return hasattr(jax, "new_ref")


class StepRing:
    """Records the updates of one optimizer in device memory. `record` is called at trace time, all else on the training thread outside of traces."""

    def __init__(
        self,
        *,
        every: int = 100,
        slots: int = 256,
        row_slots: int = 4,
        sharding: Any = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Create a ring. Device memory is taken by the first `record`.

        Args:
            every: Updates from one with rows to the next; 0 gives rows to bad ones only.
            slots: Updates that the ring holds: those of the dispatches between two snapshots, at least.
            row_slots: Row sets that the ring holds.
            sharding: A replicated `jax.sharding.Sharding` for programs over several devices.
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
        self._slots, self._row_slots = slots, row_slots
        self._sharding = sharding
        self._note = note or (lambda _: None)
        self._storage: _Storage | None = None
        self._device_every = every
        self._next = 0
        self._wants_rows = False
        self.has_pending_bad = False
        self.missed_steps = 0
        self.missed_rows = 0

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
            obstacle = _obstacle()
            if obstacle is not None:
                self._note(f"an update inside of {obstacle} is not observed")
                return False
            flags = (False,) * len(gradients) if stacked is None else tuple(stacked)
            update = _TracedStep.of(gradients, weights, loss, flags)
            storage = self._storage_of(update)
            if storage is None:
                self._note("an update of other tensors than before is not observed")
                return False
            self._trace(storage, update, emitted, skipped)
        except Exception as error:  # noqa: BLE001 - never into the program
            self._note(f"an update is not observed: {type(error).__name__}: {error}")
            return False
        return True

    def _storage_of(self, update: _TracedStep) -> _Storage | None:
        """Return the Refs, which the first call creates; None for an update that does not fit them."""
        if self._storage is not None:
            return self._storage if self._storage.signature == update.signature else None
        gradients, whole = (
            update.shapes(update.gradients),
            update.shapes((*update.gradients, *update.weights)),
        )
        ledger = np.full((self._slots + 1, _COLUMNS), -1, np.int32)
        ledger[0] = (0, 0, self._every, 0, 0, 0)
        rows = [
            np.zeros((self._row_slots, *words.shape), words.dtype)
            for words in (whole.narrow, whole.wide)
            if words is not None
        ]
        with jax.ensure_compile_time_eval():
            refs = [self._new_ref(array) for array in (ledger, *rows)]
        self._device_every = self._every
        self._storage = _Storage(
            update.signature, whole.layout, gradients.layout.rows, refs[0], tuple(refs[1:]), update.loss_dtype
        )
        return self._storage

    def _new_ref(self, array: NDArray[Any]) -> Any:
        if self._sharding is not None:
            return jax.new_ref(jax.device_put(array, self._sharding))
        _respect_uncommitted_marks()
        ref = jax.new_ref(jnp.asarray(array))
        setattr(ref, _UNCOMMITTED, True)
        return ref

    def _trace(self, storage: _Storage, update: _TracedStep, emitted: Any, skipped: Any) -> None:
        control = storage.ledger[0]
        number, every = control[_UPDATES], control[_EVERY]
        counts = jnp.asarray(True if emitted is None else emitted).reshape(())
        is_bad = jnp.logical_not(finite((*update.gradients, *update.losses)))
        is_first_bad = is_bad & (control[_WAS_BAD] == 0)
        is_due = (every > 0) & (number % jnp.maximum(every, 1) == 0)
        has_rows = counts & (is_due | is_first_bad) & bool(storage.rows)
        row_sets = control[_ROW_SETS]

        def write_rows() -> None:
            words = measure((*update.gradients, *update.weights), stacked=update.stacked_of_all)
            arrays = [array for array in (words.narrow, words.wide) if array is not None]
            for ref, array in zip(storage.rows, arrays, strict=True):
                ref[row_sets % self._row_slots] = array

        def write_update() -> None:
            storage.ledger[1 + number % self._slots] = jnp.stack(
                [
                    number,
                    is_bad.astype(np.int32),
                    jnp.asarray(False if skipped is None else skipped).reshape(()).astype(np.int32),
                    jnp.where(has_rows, row_sets, -1),
                    *update.loss_words,
                ]
            )
            storage.ledger[0] = jnp.stack(
                [
                    number + 1,
                    row_sets + has_rows,
                    every,
                    is_bad.astype(np.int32),
                    jnp.zeros_like(number),
                    jnp.zeros_like(number),
                ]
            )

        if storage.rows:
            lax.cond(has_rows, write_rows, lambda: None)
        if emitted is None:
            write_update()
        else:
            lax.cond(counts, write_update, lambda: None)

    def snapshot(self, *, with_rows: bool = False) -> RingSnapshot | None:
        """Start a copy to the host after a dispatch, without waiting; None before anything was traced.

        Args:
            with_rows: Copy rows even if they are large and none are known to be new: for the last snapshot of a program.
        """
        storage = self._storage
        if storage is None:
            return None
        if self._every != self._device_every:
            storage.ledger[0, _EVERY] = np.int32(self._every)
            self._device_every = self._every
        ledger, rows = storage.ledger[...], None
        if with_rows or self._wants_rows or storage.bytes <= _SMALL_ROWS:
            rows = tuple(ref[...] for ref in storage.rows)
            self._wants_rows = False
        for array in (ledger, *(rows or ())):
            array.copy_to_host_async()
        return RingSnapshot(ledger, rows)

    def read(self, snapshot: RingSnapshot | None) -> list[RingStep]:
        """Return the updates of a snapshot that were not read before, in their order; none of None. Waits for the device unless `RingSnapshot.is_ready`.

        An update whose rows are not part of the snapshot, and those after it, are returned by the read of a later snapshot; `has_pending_bad` is whether a
        bad one is among them. Updates that were overwritten count in `missed_steps`, their rows in `missed_rows`.
        """
        storage = self._storage
        if storage is None or snapshot is None:
            return []
        ledger = np.asarray(snapshot.ledger)
        rows = None if snapshot.rows is None else [np.asarray(array) for array in snapshot.rows]
        updates, row_sets = int(ledger[0, _UPDATES]), int(ledger[0, _ROW_SETS])
        first = max(self._next, updates - self._slots)
        self.missed_steps += first - self._next
        entries = [ledger[1 + number % self._slots] for number in range(first, updates)]
        steps: list[RingStep] = []
        self._next = first
        for entry in entries:
            row_set = int(entry[_ROW_SET])
            measured: tuple[MeasuredRows | None, MeasuredRows | None] = (None, None)
            if 0 <= row_set < row_sets - self._row_slots:
                self.missed_rows += 1
            elif row_set >= 0 and rows is None:
                self._wants_rows = True
                break
            elif row_set >= 0 and rows is not None:
                measured = self._rows(storage, [array[row_set % self._row_slots] for array in rows])
            steps.append(
                RingStep(
                    int(entry[_NUMBER]),
                    bool(entry[_BAD]),
                    bool(entry[_SKIPPED]),
                    *measured,
                    _loss(entry, storage.loss_dtype),
                )
            )
            self._next += 1
        self.has_pending_bad = any(bool(entry[_BAD]) for entry in entries[len(steps) :])
        return steps

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


def _obstacle() -> str | None:
    """Return the transformation that traces the current code and admits no closed-over Ref.

    It is found among the callers: JAX has no public way, and a ``jit`` inside of a ``vmap`` is traced without its batch dimension.
    """
    frame = sys._getframe()  # noqa: SLF001 - its public form reads source files
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in _OBSTACLES:
            return _OBSTACLES[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None
