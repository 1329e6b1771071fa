"""Rows of statistics of sharded JAX arrays: each device measures its own shards, without communication between devices.

`measure_shards` is called at trace time, as `watchstep.jax.device_rows.measure` is. Each process reads the rows of its own devices by
`shard_statistics`. Rows of disjoint shards merge by `watchstep.format.statistics.merge_rows`. Of shards with equal content on several
devices, the first device's rows are returned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from watchstep.errors import ConfigError
from watchstep.format.statistics import StatisticsBatch, merge_rows
from watchstep.format.tensors import Placement
from watchstep.jax.device_rows import RowWords, finite, measure, statistics
from watchstep.jax.sharding.process_shards import index_key, own_shards


@dataclass(frozen=True)
class ShardedTensor:
    """What is fixed about a sharded array.

    Attributes:
        shape: Shape of the whole array.
        sharding: How its elements are distributed over a mesh.
        is_stacked: Whether it has a row for each index of its first dimension.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    is_stacked: bool

    @property
    def rows(self) -> int:
        """Number of rows of the whole array."""
        return self.shape[0] if self.is_stacked else 1

    def shards(self) -> dict[Any, tuple[int, Placement]]:
        """Return for each device the first row that its shard belongs to, and the shard's placement in its rows."""
        places = self.sharding.devices_indices_map(self.shape)
        keys = {device: index_key(index, self.shape) for device, index in places.items()}
        columns = sorted({key[self.is_stacked :] for key in keys.values()})
        replicas: dict[Any, int] = {}
        shards = {}
        for device in self.sharding.mesh.devices.flat:
            key = keys[device]
            replica = replicas[key] = replicas.get(key, -1) + 1
            placement = Placement(columns.index(key[self.is_stacked :]), len(columns), replica)
            shards[device] = (key[0][0] if self.is_stacked else 0, placement)
        return shards


@functools.partial(jax.tree_util.register_dataclass, data_fields=("words",), meta_fields=("tensors",))
@dataclass(frozen=True)
class ShardWords:
    """Words of the rows of shards, a pytree.

    Attributes:
        words: Words with a leading dimension of devices, in the order of the mesh, sharded over all of its axes.
        tensors: The measured arrays.
    """

    words: RowWords
    tensors: tuple[ShardedTensor, ...]


@dataclass(frozen=True)
class ShardStatistics:
    """Rows of shards on the devices of one process.

    Attributes:
        statistics: One row per shard.
        rows: For each, the row of the whole array as `watchstep.jax.device_rows.statistics` numbers them, int of shape (n,).
        placements: The part of it that the shard is.
    """

    statistics: StatisticsBatch
    rows: np.ndarray[Any, np.dtype[np.intp]]
    placements: tuple[Placement, ...]


def measure_shards(
    tensors: Sequence[jax.Array], shardings: Sequence[NamedSharding], *, stacked: Sequence[bool] | None = None
) -> ShardWords:
    """Measure the shards of arrays inside of a traced program, each on its device.

    Args:
        tensors: Arrays or tracers.
        shardings: How each is distributed, over one mesh. Another distribution than the program's adds communication.
        stacked: Whether a tensor gets a row for each index of its first dimension. Default: none does.

    Raises:
        ConfigError: The shardings have no mesh in common, or a tensor cannot be measured.
    """
    flags = (False,) * len(tensors) if stacked is None else tuple(stacked)

    def local_words(*shards: jax.Array) -> Any:
        return jax.tree.map(lambda array: array[None], measure(shards, stacked=flags))

    words = _on_each_device(local_words, tensors, shardings)
    infos = zip(tensors, shardings, flags, strict=True)
    return ShardWords(words, tuple(ShardedTensor(tuple(array.shape), *info) for array, *info in infos))


def finite_shards(tensors: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> jax.Array:
    """Return whether all elements on each device are finite, bool of shape (devices,): the check of every step. Arguments are those of `measure_shards`."""
    flags: jax.Array = _on_each_device(lambda *shards: finite(shards)[None], tensors, shardings)
    return flags


def _on_each_device(function: Any, tensors: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> Any:
    meshes = {sharding.mesh for sharding in shardings}
    if len(meshes) != 1:
        raise ConfigError(f"arrays of {len(meshes)} meshes", "measure arrays of one mesh in one call")
    mesh = meshes.pop()
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in shardings),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return run(*(jax.lax.stop_gradient(jnp.asarray(array)) for array in tensors))


def shard_statistics(shard_words: ShardWords) -> ShardStatistics:
    """Return the rows of shards on this process's devices. Not called on the training thread: it waits for the device.

    Args:
        shard_words: The result of `measure_shards`, after the program has returned it.
    """
    return _statistics_by_device(_by_device(shard_words.words), shard_words.tensors)


def _statistics_by_device(
    by_device: Iterable[tuple[Any, RowWords]], tensors: Sequence[ShardedTensor]
) -> ShardStatistics:
    shards = [tensor.shards() for tensor in tensors]
    first = np.cumsum([0, *(tensor.rows for tensor in tensors)])
    batches: list[StatisticsBatch] = []
    rows: list[int] = []
    placements: list[Placement] = []
    for device, words in by_device:
        places: list[int] = []
        local = 0
        for tensor, count in enumerate(words.layout.tensor_rows):
            start, placement = shards[tensor][device]
            if placement.replica == 0:
                places.extend(range(local, local + count))
                rows.extend(int(first[tensor]) + start + row for row in range(count))
                placements.extend([placement] * count)
            local += count
        batches.append(statistics(words).take(np.array(places, np.intp)))
    return ShardStatistics(StatisticsBatch.concatenate(batches), np.array(rows, np.intp), tuple(placements))


def own_rows(
    words: Iterable[tuple[Any, RowWords]], tensors: Sequence[ShardedTensor]
) -> tuple[np.ndarray[Any, np.dtype[np.intp]], StatisticsBatch]:
    """Return the rows of what this process measures of arrays: those of its own shards, merged.

    Args:
        words: Each device of this process, and the words of its shards.
        tensors: The measured arrays.

    Returns:
        The rows of the whole arrays that they are parts of, ascending; and the statistics of each.
    """
    shards = _statistics_by_device(words, tensors)
    rows, owners = np.unique(shards.rows, return_inverse=True)
    if len(rows) == len(shards.rows):
        return rows, shards.statistics.take(np.argsort(shards.rows))
    return rows, merge_rows(shards.statistics, owners, len(rows))


def own_places(tensors: Sequence[ShardedTensor]) -> tuple[Placement, ...]:
    """Return which part of each row of arrays this process measures, in the order of `own_rows`; the whole of those that it does not measure."""
    return tuple(
        place or Placement()
        for tensor in tensors
        for place in own_shards(tensor.sharding, tensor.shape, tensor.is_stacked).places
    )


def _by_device(words: RowWords) -> Iterator[tuple[Any, RowWords]]:
    """Yield each device of this process, and its words."""
    parts: dict[Any, dict[str, Any]] = {}
    for name in ("narrow", "wide"):
        array = getattr(words, name)
        for shard in array.addressable_shards if array is not None else ():
            parts.setdefault(shard.device, {"narrow": None, "wide": None})[name] = np.asarray(shard.data)[0]
    for device in sorted(parts, key=lambda device: int(device.id)):
        yield device, RowWords(layout=words.layout, **parts[device])
