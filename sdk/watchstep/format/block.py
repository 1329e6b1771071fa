"""Blocks: columnar batches of the statistics of one attempt, and Arrow arrays over the same memory.

Blocks: columnar batches of the statistics of one attempt, sort keys for their rows, and views that copy columns lazily.

`SortKey` packs several columns of integers into one: sorting and grouping by one column is many times faster. Views
make a column when it is first read: rules read few columns, and copying all of them costs more than judging.

Arrow's arrays from numpy's and back, over the same memory.

`pyarrow.array` and ``to_numpy`` import pandas where it is installed: a sixth of a second and some 60 MB, in a training
process or before a first answer, for nothing that is used here.
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
    """One number for each row, that sorts as the columns do, the first before the others.

    Args:
        columns: of whole numbers, of shape (n,).

    Returns:
        int64 of shape (n,); rows have the same number where all their columns are alike.
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
        """Columns from single placements."""
        return cls(
            np.array([p.shard_index for p in placements], np.int32),
            np.array([p.shard_count for p in placements], np.int32),
            np.array([p.replica for p in placements], np.int32),
            np.array([STAGES.index(p.stage) for p in placements], np.int8),
        )

    def take(self, rows: NDArray[np.intp]) -> Places:
        """Some rows, in that order."""
        return Places(self.shard_index[rows], self.shard_count[rows], self.replica[rows], self.stage[rows])

    @classmethod
    def concatenate(cls, parts: list[Places]) -> Places:
        """Several, one after the other."""
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
        step: int64.
        mode: int8, an index into `watchstep.format.tensors.MODES`.
        worker: int32.
        time_ns: int64, nanoseconds since the epoch when the step's record was taken, by the worker's clock.
        tensor: int32, an index into ``catalogue``.
        catalogue: the tensors that rows speak of.
        places: the placement of each row.
        statistics: n rows.
        probes: further named figures, NaN where a row has none.
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
        """A block without rows."""
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
        """Some rows, in that order."""
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
        """The rows where a mask of shape (n,) is true."""
        return self.take(np.flatnonzero(chosen))

    def without_histograms(self) -> Block:
        """The same rows; to look into their histograms is an error."""
        unread = UnreadHistograms(len(self))
        return replace(self, statistics=replace(self.statistics, histogram=unread))

    def mode_name(self, row: int) -> Mode:
        """The mode of one row."""
        return MODES[int(self.mode[row])]

    def info(self, row: int) -> TensorInfo:
        """The tensor that one row speaks of."""
        return self.catalogue[int(self.tensor[row])]

    def mask_of_tensors(self, chosen: list[bool]) -> NDArray[np.bool_]:
        """Which rows speak of chosen tensors; one flag for each entry of the catalogue."""
        return np.asarray(chosen, np.bool_)[self.tensor] if len(self) else np.zeros(0, np.bool_)

    def series_key(self) -> NDArray[np.int64]:
        """int64 of shape (n,): one number for each series (tensor, worker, mode)."""
        return (self.tensor.astype(np.int64) << 32) | (self.worker.astype(np.int64) << 4) | self.mode

    def tail(self, rows: int) -> Block:
        """The last rows of each series (tensor, worker, mode), in the order in which they stand."""
        if rows <= 0:
            return self.take(np.empty(0, np.intp))
        key = self.series_key()
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        ends = np.searchsorted(ordered, ordered, side="right")
        from_end = ends - np.arange(len(ordered))
        return self.take(np.sort(order[from_end <= rows]))

    def ordered(self) -> Block:
        """The same rows by (step, worker, mode, tensor's name, place), the canonical order in which rules see them."""
        names, places = _ranks(self.catalogue), self.places
        place = (places.stage, places.replica, places.shard_index)
        key = sort_key(self.step, self.worker, self.mode, names[self.tensor], *place)
        if bool((key[1:] >= key[:-1]).all()):
            return self
        return self.take(np.argsort(key, kind="stable"))


class BlockMemory:
    """About how much memory blocks take together: a catalogue that several share counts once."""

    def __init__(self) -> None:
        self._catalogues: dict[int, tuple[TensorInfo, ...]] = {}

    def of(self, block: Block) -> int:
        """Bytes of the block, with its catalogue where no block before had it."""
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
    """Several blocks as one, over the union of their catalogues.

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
    """Blocks whose tensors are numbered over one catalogue, one after the other."""
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
    """Fields that are made by a function, once, when they are first read; for a frozen dataclass to inherit from first."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _rows: int
    _column: Callable[[str], Any]

    @classmethod
    def of(cls, rows: int, column: Callable[[str], Any]) -> Self:
        """One of so many rows.

        Args:
            rows: how many.
            column: gives a field by name.
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
    """Statistics of which each column is made when it is first read."""

    def __len__(self) -> int:
        return self._rows if "_rows" in vars(self) else super().__len__()

    def take(self, rows: NDArray[np.intp]) -> StatisticsBatch:
        """Some rows, in that order."""
        return LazyStatistics.of(len(rows), lambda name: _taken(getattr(self, name), rows))


class LazyColumns(Mapping[str, Floats]):
    """Named columns of which each is made by a function, once, when it is first read."""

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
    """A block of which each column is made when it is first read.

    What is taken of it is lazy as well, and keeps what it is taken of in memory: it is for what lives no longer than that.
    """

    _source: Block
    _at: NDArray[np.intp]

    def __len__(self) -> int:
        return self._rows if "_rows" in vars(self) else super().__len__()

    def take(self, rows: NDArray[np.intp]) -> Block:
        """Some rows, in that order."""
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
    """Some rows of a block, in that order; only what is read of them is copied."""
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
    """Two blocks over one catalogue, one after the other; only what is read of them is copied."""
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
    """An array of numpy's numbers, shape (n,), over their memory where they are contiguous.

    Args:
        values: integers or floats; not to be changed while the array lives.
        nan_is_null: NaN becomes null; only for floats.
    """
    import pyarrow as pa

    contiguous = np.ascontiguousarray(values)
    missing = np.isnan(contiguous) if nan_is_null else None
    nulls = 0 if missing is None else int(np.count_nonzero(missing))
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if nulls and missing is not None else None
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [valid, pa.py_buffer(contiguous)], nulls)


def from_words(words: Sequence[str]) -> pa.StringArray:
    """An array of strings."""
    import pyarrow as pa

    packed = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, packed)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(packed), pa.py_buffer(ends), pa.py_buffer(b"".join(packed)))


def from_codes(codes: NDArray[Any], words: Sequence[str]) -> pa.DictionaryArray:
    """An array of words as places (int32) in a dictionary of them."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(from_numbers(codes.astype(np.int32)), from_words(words))


def to_places(column: pa.ChunkedArray, places: Mapping[str, int], dtype: type, name: str) -> NDArray[Any]:
    """A column of words as the place of each, shape (n,).

    Args:
        column: of words, plain or in a dictionary.
        places: word → its place.
        dtype: of the places.
        name: the column's, for an error.

    Raises:
        KeyError: a word is not known.
        ValueError: one is null.
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
    """A column of numbers as numpy's, shape (n,), NaN where a float is null; read-only.

    Raises:
        TypeError: it is of no type that a segment's numbers have.
        ValueError: an integer is null.
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
