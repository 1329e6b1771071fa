"""One update at trace time: its tensors, the transformations around it, and the operations that write it into a ring of steps.

Rows are computed in one branch of a ``lax.cond``: at every ``every``-th update, and at the first of consecutive bad ones. A later bad update of the
same streak has no rows, because those of the first would be overwritten before the host has read them. ``every`` is a number in the ledger, so that a change
of it compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from watchstep.errors import ConfigError
from watchstep.jax.device_rows import RowWords, finite, is_measurable, measure
from watchstep.jax.ring.ring_storage import LedgerColumn, RingStorage
from watchstep.jax.sharding.shard_rows import ShardedTensor, finite_shards, measure_shards


@dataclass(frozen=True)
class TracedStep:
    """The tensors of one update, at trace time.

    Attributes:
        gradients: Gradients that can be measured.
        weights: Weights that can be measured.
        stacked_of_all: Whether each of both is stacked.
        losses: The loss, of shape (), if there is one.
        shardings: How each of gradients and weights is distributed over the devices of one mesh; empty to measure whole arrays.
    """

    gradients: tuple[Any, ...]
    weights: tuple[Any, ...]
    stacked_of_all: tuple[bool, ...]
    losses: tuple[Any, ...]
    shardings: tuple[NamedSharding, ...] = ()

    @classmethod
    def of(
        cls,
        gradients: Sequence[Any],
        weights: Sequence[Any],
        loss: Any,
        stacked: tuple[bool, ...],
        shardings: tuple[NamedSharding, ...] = (),
    ) -> TracedStep:
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
        return cls(arrays[0], arrays[1], flags, losses, shardings + shardings if weights else shardings)

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
        return shapes, self.stacked_of_all, self.loss_dtype, self.shardings

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """How gradients and weights are distributed; empty if whole arrays are measured."""
        if not self.shardings:
            return ()
        infos = zip((*self.gradients, *self.weights), self.shardings, self.stacked_of_all, strict=True)
        return tuple(ShardedTensor(tuple(array.shape), *info) for array, *info in infos)

    @property
    def gradient_rows(self) -> int:
        """Number of rows of the gradients."""
        flags = self.stacked_of_all[: len(self.gradients)]
        return sum(
            array.shape[0] if is_stacked else 1
            for array, is_stacked in zip(self.gradients, flags, strict=True)
        )

    def measured(self, arrays: Sequence[Any]) -> RowWords:
        """Return the words of gradients and weights; with a leading dimension of devices if there are shardings."""
        if not self.shardings:
            return measure(arrays, stacked=self.stacked_of_all)
        return measure_shards(arrays, self.shardings, stacked=self.stacked_of_all).words

    @property
    def shapes(self) -> RowWords:
        """The shapes of the words of gradients and weights."""
        structs = [
            jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*self.gradients, *self.weights)
        ]
        words: RowWords = jax.eval_shape(self.measured, structs)
        return words

    @property
    def gradients_are_finite(self) -> Any:
        """Whether the gradients are finite, bool of shape (). Devices with shards of their own exchange one number."""
        if not self.shardings:
            return finite(self.gradients)
        placed = list(zip(self.gradients, self.shardings, strict=False))  # those of weights follow
        sharded = [(array, sharding) for array, sharding in placed if not sharding.is_fully_replicated]
        on_each = [array for array, sharding in placed if sharding.is_fully_replicated]
        is_finite = finite(on_each)
        if not sharded:
            return is_finite
        arrays, shardings = zip(*sharded, strict=True)
        return is_finite & jnp.all(finite_shards(arrays, shardings))


def write(storage: RingStorage, update: TracedStep, emitted: Any, skipped: Any) -> None:
    """Add the operations that write an update to the program that is being traced. Arguments are those of `StepRing.record`."""
    control = storage.ledger[0]
    number, every = control[LedgerColumn.UPDATES], control[LedgerColumn.EVERY]
    counts = jnp.asarray(True if emitted is None else emitted).reshape(())
    has_bad_gradients = jnp.logical_not(update.gradients_are_finite)
    is_bad = has_bad_gradients | jnp.logical_not(finite(update.losses))
    is_first_bad = is_bad & (control[LedgerColumn.WAS_BAD] == 0)
    is_due = (every > 0) & (number % jnp.maximum(every, 1) == 0)
    has_rows = counts & (is_due | is_first_bad) & bool(storage.rows)
    row_sets = control[LedgerColumn.ROW_SETS]

    is_skipped = jnp.asarray(False if skipped is None else skipped).reshape(()).astype(np.int32)
    row_set = jnp.where(has_rows, row_sets, -1)

    def write_rows() -> None:
        words = update.measured((*update.gradients, *update.weights))
        arrays = [array for array in (words.narrow, words.wide) if array is not None]
        for ref, array in zip(storage.rows, arrays, strict=True):
            if storage.tensors:
                ref[:, row_sets % storage.row_slots] = array
            else:
                ref[row_sets % storage.row_slots] = _replicated(array)

    def write_update() -> None:
        storage.ledger[1 + number % storage.slots] = jnp.stack(
            [
                number,
                is_bad.astype(np.int32),
                is_skipped,
                row_set,
                *update.loss_words,
                has_bad_gradients.astype(np.int32),
                jnp.zeros_like(number),
            ]
        )
        is_noted = is_bad & (control[LedgerColumn.FIRST_BAD] < 0)
        storage.ledger[0] = jnp.stack(
            [
                number + 1,
                row_sets + has_rows,
                every,
                is_bad.astype(np.int32),
                control[LedgerColumn.BAD_UPDATES] + is_bad,
                jnp.where(is_noted, number, control[LedgerColumn.FIRST_BAD]),
                jnp.where(is_noted, is_skipped + 2 * has_bad_gradients, control[LedgerColumn.FIRST_FLAGS]),
                jnp.where(is_noted, row_set, control[LedgerColumn.FIRST_ROW_SET]),
            ]
        )

    if storage.rows:
        lax.cond(has_rows, write_rows, lambda: None)
    if emitted is None:
        write_update()
    else:
        lax.cond(counts, write_update, lambda: None)


def _replicated(array: Any) -> Any:
    """Return an array of a type without a sharding: under a mesh with explicit axes, those of sharded tensors have one."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    if sharding is None or not any(axis is not None for axis in sharding.spec):
        return array
    spec = jax.sharding.PartitionSpec(*(None,) * array.ndim)
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(sharding.mesh, spec))
