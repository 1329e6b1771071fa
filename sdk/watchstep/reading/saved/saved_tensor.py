"""A full tensor in saved objects, read lazily: whole, or in slices by range requests.

The tensor lies in one object, or in shards in the objects of several workers. A slice reads only the shards that it touches, and of
each shard only the bytes that it needs, except gaps below 64 KiB between them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.snapshot import DTYPES, NARROW_FLOATS, Snapshot, TensorPart, widened
from watchstep.format.tensors import Mode
from watchstep.reading.index import prefetch

if TYPE_CHECKING:
    import torch

Framework = Literal["numpy", "torch", "jax"]
Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]

WORDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names of the dtypes in PyTorch, JAX and ml_dtypes, by safetensors' names."""

_CHUNK = 8 * 1024 * 1024
"""Bytes that one request reads at most. Larger ranges are read by several threads, which reuse their memory."""

_GAP = 64 * 1024
"""A gap of fewer bytes is read along, because another request takes longer."""

_INDICES = (
    "a saved tensor is indexed by integers, slices and '...'; read it with numpy() to index the array in other ways, "
    "such as saved.numpy()[[0, 1]]"
)

_FOLDER_READERS, _BUCKET_READERS = 2, 8


@dataclass(frozen=True)
class SavedPiece:
    """The part of a tensor in one object.

    Attributes:
        worker: the worker that wrote it.
        snapshot: the object.
        start: index of its first element in the tensor, in each dimension.
        shape: its shape.
    """

    worker: int
    snapshot: Snapshot
    start: tuple[int, ...]
    shape: tuple[int, ...]


class _Range(NamedTuple):
    """Selected indices of one dimension: ``size`` from ``start``, ascending by ``step``."""

    start: int
    step: int
    size: int


class _Selection(NamedTuple):
    """A normalized index: ranges of all dimensions, and how the result's dimensions follow from them."""

    ranges: tuple[_Range, ...]
    final: tuple[int | slice | EllipsisType, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.ranges)


class _Read(NamedTuple):
    """One range of bytes, and the elements of the result that it contains, by strides."""

    offset: int
    length: int
    where: tuple[int | slice, ...]
    counts: tuple[int, ...]
    strides: tuple[int, ...]


class SavedTensor:
    """A full tensor of one step. Its values are read on access, and not cached.

    Attributes:
        name: its name.
        step: the step of the run.
        mode: the mode.
        attempt: the attempt that saved it.
        collection: the collection of its objects; empty for a snapshot.
        workers: workers whose objects contain it, ascending: several for shards, otherwise one.
        shape: shape of the tensor, or of the part that was selected or read from one worker.
        dtype: element type by safetensors' name, e.g. ``F32``, ``BF16`` or ``F8_E4M3``.
        part: its place within the whole tensor, if it is only a part: a selection of rows or channels, or one worker's shard.
    """

    def __init__(
        self,
        name: str,
        place: tuple[int, Mode, str, str],
        shape: tuple[int, ...],
        pieces: Sequence[SavedPiece],
        part: TensorPart | None,
    ) -> None:
        self.name = name
        self.step, self.mode, self.attempt, self.collection = place
        self.shape = shape
        self.part = part
        self.workers = sorted(piece.worker for piece in pieces)
        self.dtype = pieces[0].snapshot.tensors[name].dtype
        self._pieces = [piece for piece in pieces if 0 not in piece.shape]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the stored elements in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __getitem__(self, index: Index) -> NDArray[Any]:
        """Read a part: integers, slices and ``...``, with the results of numpy. bfloat16 and fp8 become float32.

        Raises:
            IndexError, TypeError: as for a numpy array; arrays of indices are not supported.
            FormatError, NotFoundError, StoreError: as for `numpy`.
        """
        return self.numpy(index)

    def numpy(self, index: Index = ...) -> NDArray[Any]:
        """Read the tensor, or a part of it. bfloat16 and fp8 become float32, which represents each of their numbers exactly.

        The array may be read-only.

        Args:
            index: the part, as for ``[]``.

        Raises:
            NotFoundError: an object no longer exists.
            FormatError: an object is shorter than when it was opened.
            StoreError: an object could not be read.
        """
        selection = _selected(index, self.shape)
        array: NDArray[Any] = widened(self._elements(selection), self.dtype)[selection.final]
        return array

    def torch(self, index: Index = ...) -> torch.Tensor:
        """Read the tensor, or a part of it, as a PyTorch tensor of the stored dtype on the CPU.

        Args:
            index: the part, as for ``[]``.

        Raises:
            ConfigError: PyTorch is not installed, or has no such dtype.
            FormatError, NotFoundError, StoreError: as for `numpy`.
        """
        module = _module("torch", "torch")
        dtype = getattr(module, WORDS[self.dtype], None)
        if dtype is None:
            raise ConfigError(
                f"tensor {self.name!r}: this version of torch has no {WORDS[self.dtype]}",
                "install a newer version of torch, or read it with numpy()",
            )
        bits = self._native(index, writable=True)
        tensor: torch.Tensor = module.from_numpy(bits.reshape(-1).view(np.uint8)).view(dtype)
        return tensor.reshape(bits.shape)

    def jax(self, index: Index = ...) -> Any:
        """Read the tensor, or a part of it, as a JAX array of the stored dtype, on JAX's default device.

        JAX converts 64-bit elements to 32 bits, unless ``jax_enable_x64`` is set.

        Args:
            index: the part, as for ``[]``.

        Raises:
            ConfigError: JAX is not installed.
            FormatError, NotFoundError, StoreError: as for `numpy`.
        """
        module = _module("jax.numpy", "jax")
        bits = self._native(index, writable=False)
        if self.dtype in NARROW_FLOATS:
            bits = bits.view(getattr(_module("ml_dtypes", "jax"), WORDS[self.dtype]))
        return module.asarray(bits)

    def read(self, framework: Framework = "numpy") -> Any:
        """Read the whole tensor with `numpy`, `torch` or `jax`.

        Raises:
            ConfigError: the framework is unknown, or not installed.
            FormatError, NotFoundError, StoreError: as for `numpy`.
        """
        if framework not in {"numpy", "torch", "jax"}:
            raise ConfigError(f"unknown framework {framework!r}", "use numpy, torch or jax")
        return getattr(self, framework)()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a saved tensor has no array that could be shared")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"SavedTensor({self.name!r}, step {self.step}, mode {self.mode}, {self.dtype}, shape {self.shape})"

    def _native(self, index: Index, *, writable: bool) -> NDArray[Any]:
        """Return elements in the machine's order of bytes, contiguous; bfloat16 and fp8 as their bits."""
        selection = _selected(index, self.shape)
        bits = self._elements(selection, writable=writable)[selection.final]
        return np.asarray(bits, DTYPES[self.dtype].newbyteorder("="), order="C")

    def _elements(self, selection: _Selection, *, writable: bool = False) -> NDArray[Any]:
        """Return the selected elements as they are stored, of the selection's counts."""
        dtype = DTYPES[self.dtype]
        if len(self._pieces) == 1 and not writable and 0 not in selection.counts:
            contiguous = self._contiguous(selection, dtype)
            if contiguous is not None:
                return contiguous
        result = np.empty(selection.counts, dtype)
        self._fill(result, selection)
        return result

    def _contiguous(self, selection: _Selection, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Read one short contiguous range of one object without a copy; None if it is not contiguous or not short."""
        (piece,) = self._pieces
        strides = _strides(piece.shape, dtype.itemsize)
        length = math.prod(selection.counts) * dtype.itemsize
        first = sum(part.start * stride for part, stride in zip(selection.ranges, strides, strict=True))
        last = sum(
            (part.start + (part.size - 1) * part.step) * stride
            for part, stride in zip(selection.ranges, strides, strict=True)
        )
        if last + dtype.itemsize - first != length or length > _CHUNK:
            return None
        data = piece.snapshot.read_bytes(self.name, first, length)
        return np.frombuffer(data, dtype).reshape(selection.counts)

    def _fill(self, result: NDArray[Any], selection: _Selection) -> None:
        def read(work: tuple[SavedPiece, NDArray[Any], _Read]) -> None:
            piece, target, part = work
            data = piece.snapshot.read_bytes(self.name, part.offset, part.length)
            target[part.where] = np.ndarray(part.counts, result.dtype, data, 0, part.strides)

        is_local = all(piece.snapshot.is_local for piece in self._pieces)
        readers = _FOLDER_READERS if is_local else _BUCKET_READERS
        for _ in prefetch(read, self._work(result, selection), readers):
            pass

    def _work(
        self, result: NDArray[Any], selection: _Selection
    ) -> Iterator[tuple[SavedPiece, NDArray[Any], _Read]]:
        """Yield what is read from each piece, and the part of the result for it."""
        if 0 in selection.counts:
            return
        for piece in self._pieces:
            cut = [
                _cut(part, start, size)
                for part, start, size in zip(selection.ranges, piece.start, piece.shape, strict=True)
            ]
            if any(within.size == 0 for _, within in cut):
                continue
            place = tuple(slice(first, first + within.size) for first, within in cut)
            target = result[place] if place else result  # an index without dimensions would copy the element
            ranges = tuple(within for _, within in cut)
            for part in _reads(_strides(piece.shape, result.itemsize), ranges, result.itemsize):
                yield piece, target, part


def _cut(part: _Range, start: int, size: int) -> tuple[int, _Range]:
    """Return the position of the first selected index within ``size`` indices from ``start``, and the selection there."""
    first = max(0, -(-(start - part.start) // part.step))
    last = min(part.size, -(-(start + size - part.start) // part.step))
    return first, _Range(part.start + first * part.step - start, part.step, max(0, last - first))


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _reads(
    strides: tuple[int, ...],
    ranges: tuple[_Range, ...],
    itemsize: int,
    offset: int = 0,
    where: tuple[int, ...] = (),
) -> Iterator[_Read]:
    """Yield ranges of bytes that contain the selected elements. No range is longer than `_CHUNK`, unless one element is.

    Args:
        strides: bytes between elements in each dimension.
        ranges: selected indices in each dimension; none is empty.
        itemsize: bytes of an element.
        offset: first byte of the array at ``where``.
        where: indices of the leading dimensions that are done.
    """
    axis = len(where)
    if axis == len(ranges):
        yield _Read(offset, itemsize, where, (), ())
        return
    start, step, count = ranges[axis]
    row, inner = strides[axis], list(zip(ranges[axis + 1 :], strides[axis + 1 :], strict=True))
    low = sum(part.start * stride for part, stride in inner)
    span = itemsize + sum((part.size - 1) * part.step * stride for part, stride in inner)
    pitch = step * row
    if count == 1 or span > _CHUNK or pitch - span >= _GAP:
        for position in range(count):
            yield from _reads(
                strides, ranges, itemsize, offset + start * row + position * pitch, (*where, position)
            )
        return
    rows = max(1, _CHUNK // pitch)
    for first in range(0, count, rows):
        number = min(rows, count - first)
        yield _Read(
            offset + start * row + first * pitch + low,
            (number - 1) * pitch + span,
            (*where, slice(first, first + number)),
            (number, *(part.size for part, _ in inner)),
            (pitch, *(part.step * stride for part, stride in inner)),
        )


def _selected(index: Index, shape: tuple[int, ...]) -> _Selection:
    """Normalize an index.

    Raises:
        IndexError: it is out of range, or has too many dimensions.
        TypeError: it is not an integer, a slice or an ellipsis.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, entry in enumerate(entries) if entry is ...]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    missing = len(shape) - (len(entries) - len(ellipses))
    if missing < 0:
        raise IndexError(
            f"too many indices: the tensor has {len(shape)} dimensions, but {len(entries)} were indexed"
        )
    position = ellipses[0] if ellipses else len(entries)
    entries[position : position + len(ellipses)] = [slice(None)] * missing
    ranges: list[_Range] = []
    final: list[int | slice | EllipsisType] = []
    for axis, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        if isinstance(entry, slice):
            indices = range(*entry.indices(size))
            is_reversed = indices.step < 0
            ascending = indices[::-1] if is_reversed else indices
            ranges.append(_Range(ascending.start if ascending else 0, ascending.step, len(ascending)))
            final.append(slice(None, None, -1) if is_reversed else slice(None))
        else:
            ranges.append(_Range(_within(entry, size, axis), 1, 1))
            final.append(0)
    if ellipses:
        final.append(...)  # an array, also of shape (); numpy does the same
    return _Selection(tuple(ranges), tuple(final))


def _within(entry: Any, size: int, axis: int) -> int:
    if isinstance(entry, bool | np.bool_):
        raise TypeError(_INDICES)
    try:
        position = operator.index(entry)
    except TypeError:
        raise TypeError(_INDICES) from None
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for axis {axis} with size {size}")
    return position % size


def _module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{package} cannot be imported ({error})",
            f"install it with: pip install {package}, or read the tensor with numpy()",
        ) from error
