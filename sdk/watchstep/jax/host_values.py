"""Arrays of JAX as they lie in host memory, measured without a copy and without a reference that outlasts the measurement.

An array of NumPy that shares the memory of one of JAX would keep it from being donated.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import numpy as np
from numpy.typing import NDArray

from watchstep.format.tensors import Placement, Stage
from watchstep.jax.sharding.process_shards import distinct_devices, own_shards
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
        shapes: shape of each.
        dtypes: type of each one's elements.
        sizes: number of elements of each.
        kinds: number of each one's element type in `KINDS`.
        widths: size of an element of each in bytes.
        layers: number of layers of each; 1 for a parameter that is not a stack.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
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
        sizes = [math.prod(shape) for shape in shapes]
        return cls(
            tuple(map(tuple, shapes)), tuple(map(jax.numpy.dtype, dtypes)), sizes, kinds, widths, layers
        )

    def ranges(self, arrays: Sequence[Any]) -> MemoryRanges | None:
        """Return the memory of arrays that are computed; None if one is missing or is not on one device of the host."""
        for array, shape, dtype in zip(arrays, self.shapes, self.dtypes, strict=True):
            if array is None or array.shape != shape or array.dtype != dtype:
                return None  # memory is never read by the description of another array
        if jax.process_count() > 1 and not all(map(is_single, arrays)):
            return None  # the address of an array with shards in other processes is that of its shard here
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
        arrays: array of each parameter. Of those of several devices, this process measures the shards that are its own.
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
        sources = self._sources()
        existing: list[int] = []
        parts: list[_Part] = []
        owners: list[int] = []
        for row in rows:
            own = self._parts(*sources[row])
            if own:
                parts.extend(own)
                owners.extend([len(existing)] * len(own))
                existing.append(row)
        measurement = _measured(parts)
        if len(parts) == len(existing):
            return existing, measurement
        return existing, Merged(
            [Reordered((measurement,), (place,)) for place in range(len(parts))], owners, len(existing)
        )

    def places(self, stage: Stage = "local") -> tuple[Placement, ...]:
        """Return which part of each row this process measures; empty if it measures all of them as a whole.

        Args:
            stage: the stage of arrays that are divided among processes, or equal on them.
        """
        if jax.process_count() == 1:
            return ()
        divided = [isinstance(array, jax.Array) and not array.is_fully_addressable for array in self.arrays]
        if not any(divided):
            return ()
        places: list[Placement] = []
        for place, layer in self._sources():
            array = self.arrays[place]
            found = None
            if divided[place]:
                found = own_shards(array.sharding, array.shape, self._is_stack(place)).places[layer]
            places.append(Placement() if found is None else replace(found, stage=stage))
        return tuple(places)

    def _sources(self) -> list[tuple[int, int]]:
        """Return the array of each row, and the layer in it."""
        counts = self.layers or (1,) * len(self.arrays)
        return [(place, layer) for place, count in enumerate(counts) for layer in range(count)]

    def _is_stack(self, place: int) -> bool:
        return bool(self.layers) and self.layers[place] > 1

    def _parts(self, place: int, layer: int) -> list[_Part]:
        """Return the parts of a layer that this process measures."""
        array, is_stack = self.arrays[place], self._is_stack(place)
        if array is None:
            return []
        if is_single(array):
            return [_Part(array, layer if is_stack else None)]
        data = {shard.device: shard.data for shard in array.addressable_shards}
        return [
            _Part(data[shard.device], layer - shard.first_layer if is_stack else None)
            for shard in own_shards(array.sharding, array.shape, is_stack).of_layer(layer)
        ]

    def has_nonfinite(self, turn: int, slices: int) -> bool:
        """Return whether an element is NaN or infinite."""
        native = native_kernel.load()
        memory = self.layout.ranges(self.arrays) if self.layout is not None else None
        if native is not None and memory is not None:
            return native.any_nonfinite(memory, turn, slices)
        # Shards that another process measures, too: a bad element is found by each process that has it.
        arrays = [array for array in self.arrays if array is not None]
        shards = [
            _Part(shard)
            for array in arrays
            for shard in ([array] if is_single(array) else _distinct_shards(array))
        ]
        ranges = [shard.memory() for shard in shards]
        if native is None or not all(ranges):
            return HostArrays(tuple(shard.array() for shard in shards)).has_nonfinite(turn, slices)
        return native.has_nonfinite([part for part in ranges if part], turn, slices)

    def array(self, row: int) -> NDArray[Any] | None:
        """Return a copy of an array; None for one that other processes hold in part."""
        place, layer = self._sources()[row]
        array = self.arrays[place]
        if array is None or not array.is_fully_addressable:
            return None
        return np.array(array[layer] if self._is_stack(place) else array)


@dataclass(frozen=True)
class _Part:
    """A layer of an array that is on one device.

    Attributes:
        data: the array.
        layer: index of its first dimension; None for the whole array.
    """

    data: Any
    layer: int | None = None

    def memory(self) -> MemoryRange | None:
        """Return its memory; None if the compiled kernel cannot read it. Waits for its computation."""
        name = self.data.dtype.name
        kind = _KIND_OF.get(name)
        if kind is None or not self.data.size:
            return None
        jax.block_until_ready(self.data)
        address, size = self.data.unsafe_buffer_pointer(), self.data.size
        if self.layer is None:
            return MemoryRange(address, size, kind)
        size //= self.data.shape[0]
        return MemoryRange(address + self.layer * size * _WIDTHS[name], size, kind)

    def array(self) -> NDArray[Any]:
        """Return it as an array of NumPy. Waits for its computation."""
        whole = np.asarray(self.data)
        return whole if self.layer is None else whole[self.layer]


@dataclass(frozen=True)
class PremeasuredWeights:
    """Weights that were measured before the step that donates them.

    Attributes:
        rows: indices of the measured parameters.
        measurement: their statistics.
        places: which part of each parameter was measured; empty for whole ones.
        arrays: copies of those that are saved in full.
    """

    rows: tuple[int, ...]
    measurement: Measurement
    places: tuple[Placement, ...] = ()
    arrays: dict[int, Any] = field(default_factory=dict)
    is_measured: ClassVar[bool] = False

    def measure(self, rows: Any) -> tuple[list[int], Measurement]:
        """Return the statistics of some of them, which are known."""
        if tuple(rows) == self.rows:
            return list(self.rows), self.measurement
        places = {row: place for place, row in enumerate(self.rows)}
        chosen = [row for row in rows if row in places]
        return chosen, Reordered((self.measurement,), tuple(places[row] for row in chosen))

    def has_nonfinite(self, turn: int, slices: int) -> bool:  # noqa: ARG002 - weights are not checked
        """Return False."""
        return False

    def array(self, row: int) -> Any:
        """Return the copy of one."""
        return self.arrays.get(row)


def is_on_host(array: Any) -> bool:
    """Return whether an array of JAX is in host memory."""
    return all(device.platform == "cpu" for device in array.devices())


def host_memory(array: Any) -> list[NDArray[Any]] | None:
    """Return the memory of the parts of an array, to be read at once: it is the array's, which the result does not refer to.

    Returns:
        An array of elements without a type for each part; None if it is not in host memory, not computed yet or deleted, or has elements of unknown size.
    """
    dtype = array.dtype
    has_size = isinstance(dtype, np.dtype) and (dtype.kind in "biufc" or dtype.name in _WIDTHS)
    if not has_size or array.is_deleted() or not (is_on_host(array) and array.is_ready()):
        return None
    parts = [shard.data for shard in array.addressable_shards]
    return [
        np.frombuffer(
            (ctypes.c_char * part.nbytes).from_address(part.unsafe_buffer_pointer()),
            np.dtype((np.void, dtype.itemsize)),
        )
        for part in parts
        if part.size
    ]


def is_single(array: Any) -> bool:
    """Return whether an array is on one device."""
    return bool(array.sharding.num_devices == 1)


def _distinct_shards(array: Any) -> list[Any]:
    """Return the shards on devices of this process, without replicas."""
    devices = distinct_devices(array.sharding, array.shape)
    return [shard.data for shard in array.addressable_shards if shard.device in devices]


def _measured(parts: Sequence[_Part]) -> Measurement:
    native = native_kernel.load()
    ranges = [part.memory() for part in parts]
    if native is not None and all(ranges):
        return native.measure([memory for memory in ranges if memory])
    _, measurement = HostArrays(tuple(part.array() for part in parts)).measure(range(len(parts)))
    return measurement
