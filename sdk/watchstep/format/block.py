"""Blocks: columnar batches of the statistics of one attempt, and Arrow arrays over the same memory.

Blocks: columnar batches of the statistics of one attempt, sort keys for their rows, and views that copy columns lazily.

`SortKey` packs several columns of integers into one: sorting and grouping by one column is many times faster. Views
create a column on first access: rules read few columns, and copying all of them costs more than their evaluation.

Arrow arrays are converted from and to numpy over the same memory.

`pyarrow.array` and ``to_numpy`` import pandas if it is installed: a sixth of a second and about 60 MB in a training
process or before a first response, without any use here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats, StatisticsBatch, UnreadHistograms
from watchstep.format.tensors import MODES, Mode, Placement, Stage, TensorInfo

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self


_ROOM = 2**62


def sort_key(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return one number per row with the sort order of the columns, the first column first.

    Args:
        columns: Integers of shape (n,).

    Returns:
        int64 of shape (n,); rows have the same number if all their columns are equal.
    """
    key = np.zeros(len(columns[0]), np.int64)
    if not len(key):
        return key
    span = 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        digit = column.astype(np.int64) if high - low < _ROOM else np.unique(column, return_inverse=True)[1]
        low, width = (low, high - low + 1) if high - low < _ROOM else (0, len(column))
        if span * width > _ROOM:
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
            span = len(key)
        if span * width > _ROOM:
            digit, low, width = np.unique(digit, return_inverse=True)[1], 0, len(column)
        key = key * width + (digit - low)
        span *= width
    return key


STAGES: tuple[Stage, ...] = ("local", "reduced")

_ROW_BYTES = 150
"""Of one row's columns, without histograms and probes."""

_BIN_BYTES = 10


@dataclass(frozen=True)
class Places:
    """Placement of n rows, in columns: int32 of shape (n,), and the stage as an index into `STAGES`."""

    shard_index: NDArray[np.int32]
    shard_count: NDArray[np.int32]
    replica: NDArray[np.int32]
    stage: NDArray[np.int8]

    @classmethod
    def of(cls, placements: list[Placement]) -> Places:
        """Return columns of single placements."""
        return cls(
            np.array([p.shard_index for p in placements], np.int32),
            np.array([p.shard_count for p in placements], np.int32),
            np.array([p.replica for p in placements], np.int32),
            np.array([STAGES.index(p.stage) for p in placements], np.int8),
        )

    def take(self, rows: NDArray[np.intp]) -> Places:
        """Return some rows, in that order."""
        return Places(self.shard_index[rows], self.shard_count[rows], self.replica[rows], self.stage[rows])

    @classmethod
    def concatenate(cls, parts: list[Places]) -> Places:
        """Concatenate several placements."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *(p.shard_index for p in parts)]),
            np.concatenate([np.empty(0, np.int32), *(p.shard_count for p in parts)]),
            np.concatenate([np.empty(0, np.int32), *(p.replica for p in parts)]),
            np.concatenate([np.empty(0, np.int8), *(p.stage for p in parts)]),
        )


@dataclass(frozen=True)
class Block:
    """Statistics rows of one attempt, each column an array of shape (n,).

    Attributes:
        step: Step, int64.
        mode: int8, an index into `watchstep.format.tensors.MODES`.
        worker: int32.
        time_ns: int64, nanoseconds since the epoch when the step's record was taken, by the worker's clock.
        tensor: int32, an index into ``catalogue``.
        catalogue: Tensors of the rows.
        places: Placement of each row.
        statistics: Statistics of n rows.
        probes: Additional figures by name, NaN for rows without a value.
    """

    step: NDArray[np.int64]
    mode: NDArray[np.int8]
    worker: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    tensor: NDArray[np.int32]
    catalogue: tuple[TensorInfo, ...]
    places: Places
    statistics: StatisticsBatch
    probes: Mapping[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def empty(cls) -> Block:
        """Return a block without rows."""
        return cls(
            step=np.empty(0, np.int64),
            mode=np.empty(0, np.int8),
            worker=np.empty(0, np.int32),
            time_ns=np.empty(0, np.int64),
            tensor=np.empty(0, np.int32),
            catalogue=(),
            places=Places.of([]),
            statistics=StatisticsBatch.empty(),
        )

    def take(self, rows: NDArray[np.intp]) -> Block:
        """Return some rows, in that order."""
        return Block(
            step=self.step[rows],
            mode=self.mode[rows],
            worker=self.worker[rows],
            time_ns=self.time_ns[rows],
            tensor=self.tensor[rows],
            catalogue=self.catalogue,
            places=self.places.take(rows),
            statistics=self.statistics.take(rows),
            probes={name: column[rows] for name, column in self.probes.items()},
        )

    def where(self, chosen: NDArray[np.bool_]) -> Block:
        """Return the rows selected by a mask of shape (n,)."""
        return self.take(np.flatnonzero(chosen))

    def without_histograms(self) -> Block:
        """Return the same rows with unread histograms, on which access raises an error."""
        unread = UnreadHistograms(len(self))
        return replace(self, statistics=replace(self.statistics, histogram=unread))

    def mode_name(self, row: int) -> Mode:
        """Return the mode of one row."""
        return MODES[int(self.mode[row])]

    def info(self, row: int) -> TensorInfo:
        """Return the tensor of one row."""
        return self.catalogue[int(self.tensor[row])]

    def mask_of_tensors(self, chosen: list[bool]) -> NDArray[np.bool_]:
        """Return the mask of rows of chosen tensors; ``chosen`` has one flag per entry of the catalogue."""
        return np.asarray(chosen, np.bool_)[self.tensor] if len(self) else np.zeros(0, np.bool_)

    def series_key(self) -> NDArray[np.int64]:
        """Return int64 of shape (n,): one number per series (tensor, worker, mode)."""
        return (self.tensor.astype(np.int64) << 32) | (self.worker.astype(np.int64) << 4) | self.mode

    def tail(self, rows: int) -> Block:
        """Return the last rows of each series (tensor, worker, mode), in their order."""
        if rows <= 0:
            return self.take(np.empty(0, np.intp))
        key = self.series_key()
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        ends = np.searchsorted(ordered, ordered, side="right")
        from_end = ends - np.arange(len(ordered))
        return self.take(np.sort(order[from_end <= rows]))

    def ordered(self) -> Block:
        """Return the same rows sorted by (step, worker, mode, tensor's name, place), the canonical order for rules."""
        names, places = _ranks(self.catalogue), self.places
        place = (places.stage, places.replica, places.shard_index)
        key = sort_key(self.step, self.worker, self.mode, names[self.tensor], *place)
        if bool((key[1:] >= key[:-1]).all()):
            return self
        return self.take(np.argsort(key, kind="stable"))


class BlockMemory:
    """Approximate memory of several blocks. A shared catalogue counts once."""

    def __init__(self) -> None:
        self._catalogues: dict[int, tuple[TensorInfo, ...]] = {}

    def of(self, block: Block) -> int:
        """Return the bytes of the block, including its catalogue if no earlier block had it."""
        histogram = block.statistics.histogram
        bins = 0 if isinstance(histogram, UnreadHistograms) else len(histogram.bins)
        size = len(block) * (_ROW_BYTES + 8 * len(block.probes)) + bins * _BIN_BYTES
        if id(block.catalogue) not in self._catalogues:
            self._catalogues[id(block.catalogue)] = block.catalogue
            size += sum(info.memory for info in block.catalogue)
        return size


_ranked: tuple[tuple[TensorInfo, ...], NDArray[np.int64]] = ((), np.empty(0, np.int64))


def _ranks(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """The place of each tensor's name in alphabetical order; kept for the last catalogue, which mostly comes again."""
    global _ranked  # noqa: PLW0603 - one assignment, and whoever reads the one before computes it anew
    known, ranks = _ranked
    if known is not catalogue:
        ranks = np.empty(len(catalogue), np.int64)
        ranks[sorted(range(len(ranks)), key=lambda index: catalogue[index].name)] = np.arange(len(ranks))
        _ranked = (catalogue, ranks)
    return ranks


def concatenate(blocks: list[Block]) -> Block:
    """Concatenate blocks, over the union of their catalogues.

    A tensor that several blocks describe keeps the description of the last.
    """
    blocks = [block for block in blocks if len(block.catalogue)]
    if not blocks:
        return Block.empty()
    if len(blocks) == 1:
        return blocks[0]
    if all(block.catalogue is blocks[0].catalogue for block in blocks):
        return _stacked(blocks, blocks[0].catalogue, [block.tensor for block in blocks])
    places: dict[str, int] = {}
    catalogue: list[TensorInfo] = []
    tensors = []
    for block in blocks:
        for info in block.catalogue:
            if info.name in places:
                catalogue[places[info.name]] = info
            else:
                places[info.name] = len(catalogue)
                catalogue.append(info)
        place = np.array([places[info.name] for info in block.catalogue], np.int32)
        tensors.append(place[block.tensor])
    return _stacked(blocks, tuple(catalogue), tensors)


def _stacked(
    blocks: list[Block], catalogue: tuple[TensorInfo, ...], tensors: list[NDArray[np.int32]]
) -> Block:
    """Concatenate blocks with tensor numbers of one catalogue."""
    names = {name for block in blocks for name in block.probes}
    return Block(
        step=np.concatenate([block.step for block in blocks]),
        mode=np.concatenate([block.mode for block in blocks]),
        worker=np.concatenate([block.worker for block in blocks]),
        time_ns=np.concatenate([block.time_ns for block in blocks]),
        tensor=np.concatenate(tensors),
        catalogue=catalogue,
        places=Places.concatenate([block.places for block in blocks]),
        statistics=StatisticsBatch.concatenate([block.statistics for block in blocks]),
        probes={
            name: np.concatenate([block.probes.get(name, np.full(len(block), np.nan)) for block in blocks])
            for name in sorted(names)
        },
    )


class _Lazy:
    """Base with fields that a function computes once, on first access. A frozen dataclass inherits from it first."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _rows: int
    _column: Callable[[str], Any]

    @classmethod
    def of(cls, rows: int, column: Callable[[str], Any]) -> Self:
        """One of so many rows.

        Args:
            rows: Number of rows.
            column: Returns a field by name.
        """
        made = cls.__new__(cls)
        object.__setattr__(made, "_rows", rows)
        object.__setattr__(made, "_column", column)
        return made

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:
            raise AttributeError(name)
        column = self._column(name)
        object.__setattr__(self, name, column)
        return column


class LazyStatistics(_Lazy, StatisticsBatch):
    """Statistics with columns that are computed on first access."""

    def __len__(self) -> int:
        return self._rows if "_rows" in vars(self) else super().__len__()

    def take(self, rows: NDArray[np.intp]) -> StatisticsBatch:
        """Return some rows, in that order."""
        return LazyStatistics.of(len(rows), lambda name: _taken(getattr(self, name), rows))


class LazyColumns(Mapping[str, Floats]):
    """Named columns that a function computes once, on first access."""

    def __init__(self, names: Iterable[str], column: Callable[[str], Floats]) -> None:
        self._names = dict.fromkeys(names)
        self._column = column
        self._made: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            self._made[name] = self._column(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class LazyBlock(_Lazy, Block):
    """A block with columns that are computed on first access.

    Its rows from `take` are also lazy and keep their source in memory, so it is intended for short-lived data.
    """

    _source: Block
    _at: NDArray[np.intp]

    def __len__(self) -> int:
        return self._rows if "_rows" in vars(self) else super().__len__()

    def take(self, rows: NDArray[np.intp]) -> Block:
        """Return some rows, in that order."""
        if "_source" not in vars(self):
            return _view(self, rows)
        # Of what this is taken of itself, so that no column of what lies between need be made.
        return _view(self._source, self._at[rows])

    def as_taken(self, source: Block, at: NDArray[np.intp]) -> LazyBlock:
        """The same, now known to be these rows of another block."""
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_at", at)
        return self


def view(block: Block, rows: NDArray[np.intp]) -> Block:
    """Return some rows of a block, in that order. Columns are copied on first access."""
    return block.take(rows) if isinstance(block, LazyBlock) else _view(block, rows)


def _view(block: Block, rows: NDArray[np.intp]) -> LazyBlock:
    def column(name: str) -> Any:
        whole = getattr(block, name)
        if name == "catalogue":
            return whole
        if name == "statistics":
            return LazyStatistics.of(len(rows), lambda figure: _taken(getattr(whole, figure), rows))
        if name == "probes":
            return LazyColumns(whole, lambda probe: whole[probe][rows])
        return _taken(whole, rows)

    return LazyBlock.of(len(rows), column).as_taken(block, rows)


def together(first: Block, second: Block) -> Block:
    """Concatenate two blocks of one catalogue. Columns are copied on first access."""
    if first.catalogue is not second.catalogue and first.catalogue != second.catalogue:
        return concatenate([first, second])

    def column(name: str) -> Any:
        block, other = getattr(first, name), getattr(second, name)
        if name == "catalogue":
            return block
        if name == "places":
            return Places.concatenate([block, other])
        if name == "statistics":
            return LazyStatistics.of(
                len(first) + len(second),
                lambda figure: _joined(getattr(block, figure), getattr(other, figure)),
            )
        if name == "probes":
            return LazyColumns(
                sorted({*block, *other}),
                lambda each: np.concatenate([_probe(first, each), _probe(second, each)]),
            )
        return np.concatenate([block, other])

    return LazyBlock.of(len(first) + len(second), column)


def _taken(column: Any, rows: NDArray[np.intp]) -> Any:
    """Of an array, places or histograms."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    return type(first).concatenate([first, second])


def _probe(block: Block, name: str) -> NDArray[np.float64]:
    column = block.probes.get(name)
    return np.full(len(block), np.nan) if column is None else column


_DTYPES = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "double": np.float64}


def from_numbers(values: NDArray[Any], *, nan_is_null: bool = False) -> pa.Array:
    """Return an Arrow array of numpy's numbers, shape (n,), over their memory if they are contiguous.

    Args:
        values: Integers or floats, which must not change during the lifetime of the array.
        nan_is_null: Whether NaN becomes null; only for floats.
    """
    import pyarrow as pa

    contiguous = np.ascontiguousarray(values)
    missing = np.isnan(contiguous) if nan_is_null else None
    nulls = 0 if missing is None else int(np.count_nonzero(missing))
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if nulls and missing is not None else None
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [valid, pa.py_buffer(contiguous)], nulls)


def from_words(words: Sequence[str]) -> pa.StringArray:
    """Return an Arrow array of strings."""
    import pyarrow as pa

    packed = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, packed)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(packed), pa.py_buffer(ends), pa.py_buffer(b"".join(packed)))


def from_codes(codes: NDArray[Any], words: Sequence[str]) -> pa.DictionaryArray:
    """An array of words as places (int32) in a dictionary of them."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(from_numbers(codes.astype(np.int32)), from_words(words))


def to_places(column: pa.ChunkedArray, places: Mapping[str, int], dtype: type, name: str) -> NDArray[Any]:
    """Return the index of each word in a column, shape (n,).

    Args:
        column: Column of words, plain or dictionary-encoded.
        places: Index by word.
        dtype: Type of the indices.
        name: Name of the column for error messages.

    Raises:
        KeyError: A word is unknown.
        ValueError: A word is null.
    """
    import pyarrow as pa

    merged = pa.concat_arrays(column.chunks) if column.num_chunks else from_words([])
    if not pa.types.is_dictionary(merged.type):
        merged = merged.dictionary_encode()
    if merged.null_count:
        raise ValueError(f"column {name} has nulls")
    place: NDArray[Any] = np.array([places[word] for word in merged.dictionary.to_pylist()] or [0], dtype)
    found_places: NDArray[Any] = place[to_numbers(merged.indices)]
    return found_places


def to_numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers as a read-only numpy array, shape (n,), with NaN for null floats.

    Raises:
        TypeError: The column has no numeric type of a segment.
        ValueError: An integer is null.
    """
    import pyarrow as pa

    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_numbers(chunk) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, _dtype(column.type))


def _numbers(array: pa.Array) -> NDArray[Any]:
    dtype = np.dtype(_dtype(array.type))
    if not len(array):
        return np.empty(0, dtype)
    valid, data = array.buffers()
    values = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    if not array.null_count:
        return values
    if dtype.kind != "f":
        raise ValueError(f"{array.null_count} of {len(array)} integers are null")
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
    return np.where(bits[array.offset : array.offset + len(array)], values, np.nan)


def _dtype(kind: pa.DataType) -> type:
    dtype = _DTYPES.get(str(kind))
    if dtype is None:
        raise TypeError(f"numbers of type {str(kind)[:80]} are not read")
    return dtype
