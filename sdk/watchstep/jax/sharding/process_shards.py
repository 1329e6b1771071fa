"""Which shards of an array a process measures.

Each element is measured by one process, and by it once: of shards with equal content, the one on the first device of the sharding is measured. The rows
of the processes merge to that of the whole array.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from watchstep.format.tensors import Placement

Interval = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of each dimension."""


@dataclass(frozen=True)
class OwnShard:
    """A shard that this process measures.

    Attributes:
        device: the device that has it.
        first_layer: the first layer that it has elements of; 0 in an array that is not a stack.
        layers: number of these layers.
    """

    device: Any
    first_layer: int
    layers: int


@dataclass(frozen=True)
class OwnShards:
    """The shards of an array that this process measures.

    Attributes:
        shards: the shards. They are disjoint.
        places: for each layer, which part of it they are; None if this process measures nothing of it.
    """

    shards: tuple[OwnShard, ...]
    places: tuple[Placement | None, ...]

    def of_layer(self, layer: int) -> list[OwnShard]:
        """Return the shards with elements of a layer."""
        return [
            shard for shard in self.shards if shard.first_layer <= layer < shard.first_layer + shard.layers
        ]


@functools.lru_cache(maxsize=4096)
def own_shards(sharding: Any, shape: tuple[int, ...], is_stack: bool) -> OwnShards:
    """Return the shards of an array that this process measures.

    Args:
        sharding: how the array is distributed.
        shape: shape of the whole array.
        is_stack: whether each index of its first dimension is a layer of its own.
    """
    here = jax.process_index()
    first: dict[Interval, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        first.setdefault(index_key(index, shape), device)
    processes: list[set[int]] = [set() for _ in range(shape[0] if is_stack else 1)]
    shards: list[OwnShard] = []
    for interval, device in first.items():
        start, stop = interval[0] if is_stack else (0, 1)
        for layer in range(start, stop):
            processes[layer].add(device.process_index)
        if device.process_index == here:
            shards.append(OwnShard(device, start, stop - start))
    return OwnShards(tuple(shards), tuple(_place(here, sorted(owners)) for owners in processes))


@functools.lru_cache(maxsize=4096)
def distinct_devices(sharding: Any, shape: tuple[int, ...]) -> frozenset[Any]:
    """Return devices of this process that have all of its shards of an array, each once."""
    places = sharding.addressable_devices_indices_map(shape)
    return frozenset({index_key(index, shape): device for device, index in places.items()}.values())


def _place(here: int, owners: list[int]) -> Placement | None:
    return Placement(owners.index(here), len(owners)) if here in owners else None


def index_key(index: tuple[slice, ...], shape: tuple[int, ...]) -> Interval:
    """Return the interval of a shard's index."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
