"""Arrays of JAX as they lie in host memory, measured without a copy and without a reference that outlasts the measurement.

An array of NumPy that shares the memory of one of JAX would keep it from being donated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from numpy.typing import NDArray

from watchstep.kernels import native_kernel
from watchstep.kernels.measurement import Measurement, Merged, Reordered
from watchstep.kernels.native_kernel import KINDS, MemoryRange, MemoryRanges
from watchstep.updates.tensor_values import HostArrays

_KIND_OF: dict[str, int] = {str(name): number for name, number in KINDS.items()}

_WIDTHS: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class HostLayout:
    """Sizes and kinds of arrays, as the compiled kernel takes them.

    Attributes:
        sizes: number of elements of each.
        kinds: number of each one's element type in `KINDS`.
        widths: size of an element of each in bytes.
        layers: number of layers of each; 1 for a parameter that is not a stack.
    """

    sizes: list[int]
    kinds: list[int]
    widths: list[int]
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], layers: tuple[int, ...]
    ) -> HostLayout | None:
        """Return the layout of arrays; None if the compiled kernel cannot read one of them."""
        if native_kernel.load() is None or not all(dtype in _KIND_OF for dtype in dtypes):
            return None
        kinds = [_KIND_OF[dtype] for dtype in dtypes]
        widths = [_WIDTHS[dtype] for dtype in dtypes]
        return cls([math.prod(shape) for shape in shapes], kinds, widths, layers)

    def ranges(self, arrays: Sequence[Any]) -> MemoryRanges | None:
        """Return the memory of arrays that are computed; None if one is missing or is not on one device of the host."""
        if not all(
            getattr(array, "size", -1) == size and _KIND_OF.get(array.dtype.name) == kind
            for array, size, kind in zip(arrays, self.sizes, self.kinds, strict=True)
        ):
            return None  # memory is never read by the description of another array
        try:
            return MemoryRanges([array.unsafe_buffer_pointer() for array in arrays], self.sizes, self.kinds)
        except (AttributeError, RuntimeError, ValueError):
            return None

    def layer_ranges(self, arrays: Sequence[Any]) -> list[MemoryRange] | None:
        """Return the memory of each layer; None as `ranges`."""
        memory = self.ranges(arrays)
        if memory is None:
            return None
        columns = zip(memory.addresses, self.sizes, self.kinds, self.widths, self.layers, strict=True)
        return [
            MemoryRange(address + layer * (size // layers) * width, size // layers, kind)
            for address, size, kind, width, layers in columns
            for layer in range(layers)
        ]


@dataclass(frozen=True)
class JaxArrays:
    """Arrays of JAX whose elements are in host memory, and computed.

    Attributes:
        arrays: array of each parameter. Those of several devices of this process are measured shard by shard.
        layout: their sizes and kinds, if the compiled kernel can read all of them.
        layers: number of layers of each, 1 for one that is not a stack; empty if none is.
    """

    arrays: tuple[Any, ...]
    layout: HostLayout | None = None
    layers: tuple[int, ...] = ()
    is_measured: ClassVar[bool] = False

    def measure(self, rows: Sequence[int]) -> tuple[list[int], Measurement]:
        """Measure some arrays. Waits until they are computed; the statistics are complete when this returns."""
        native = native_kernel.load()
        memory = self.layout.layer_ranges(self.arrays) if self.layout is not None else None
        if native is not None and memory is not None:
            return list(rows), native.measure([memory[row] for row in rows])
        if self.is_stacked:
            return self.split().measure(rows)
        existing = [row for row in rows if self.arrays[row] is not None]
        shards, owners = self._shards(existing)
        measurement = _measured(shards)
        if len(shards) == len(existing):
            return existing, measurement
        return existing, Merged(
            [Reordered((measurement,), (place,)) for place in range(len(shards))], owners, len(existing)
        )

    @property
    def is_stacked(self) -> bool:
        """Whether an array is a stack of layers."""
        return any(count > 1 for count in self.layers)

    def split(self) -> JaxArrays:
        """Return the layers as arrays of their own."""
        return JaxArrays(
            tuple(
                array if count == 1 else array[layer]
                for array, count in zip(self.arrays, self.layers, strict=True)
                for layer in range(count)
            )
        )

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite."""
        native = native_kernel.load()
        memory = self.layout.ranges(self.arrays) if self.layout is not None else None
        if native is not None and memory is not None:
            return native.any_nonfinite(memory, turn, slices)
        shards, _ = self._shards([row for row, array in enumerate(self.arrays) if array is not None])
        ranges = [_memory_of(shard) for shard in shards]
        if native is None or not all(ranges):
            return HostArrays(tuple(np.asarray(shard) for shard in shards)).has_nonfinite(turn, slices)
        return native.has_nonfinite([part for part in ranges if part], turn, slices)

    def array(self, row: int) -> NDArray[Any] | None:
        """Return a copy of an array; None for one that other processes hold in part."""
        if self.is_stacked:
            return self.split().array(row)
        array = self.arrays[row]
        return np.array(array) if array is not None and array.is_fully_addressable else None

    def _shards(self, rows: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return the distinct parts of some arrays that are in this process, and the index of the array of each."""
        shards: list[Any] = []
        owners: list[int] = []
        for place, row in enumerate(rows):
            array = self.arrays[row]
            parts = [array] if is_single(array) else _distinct_shards(array)
            shards.extend(parts)
            owners.extend([place] * len(parts))
        return shards, owners


def is_on_host(array: Any) -> bool:
    """Return whether an array of JAX is in host memory."""
    return all(device.platform == "cpu" for device in array.devices())


def is_single(array: Any) -> bool:
    """Return whether an array is on one device."""
    return len(array.devices()) == 1


def _distinct_shards(array: Any) -> list[Any]:
    """Return the shards of this process, without replicas."""
    seen: dict[Any, Any] = {}
    for shard in array.addressable_shards:
        seen.setdefault(_index_key(shard.index), shard.data)
    return list(seen.values())


def _index_key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)


def _measured(arrays: Sequence[Any]) -> Measurement:
    native = native_kernel.load()
    ranges = [_memory_of(array) for array in arrays]
    if native is not None and all(ranges):
        return native.measure([memory for memory in ranges if memory])
    _, measurement = HostArrays(tuple(np.asarray(array) for array in arrays)).measure(range(len(arrays)))
    return measurement


def _memory_of(array: Any) -> MemoryRange | None:
    """Return the memory of an array on one device; None if the compiled kernel cannot read it. Waits for its computation."""
    kind = _KIND_OF.get(array.dtype.name)
    if kind is None or not array.size:
        return None
    jax.block_until_ready(array)
    return MemoryRange(array.unsafe_buffer_pointer(), array.size, kind)
