"""Blocks whose columns are made when they are first read: rules read few of them, and copying all costs more than judging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block, Places, concatenate
from watchstep.statistics import Floats, StatisticsBatch

if TYPE_CHECKING:  # Python 3.10 has no typing.Self
    from typing_extensions import Self


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
        one, other = getattr(first, name), getattr(second, name)
        if name == "catalogue":
            return one
        if name == "places":
            return Places.concatenate([one, other])
        if name == "statistics":
            return LazyStatistics.of(
                len(first) + len(second), lambda figure: _joined(getattr(one, figure), getattr(other, figure))
            )
        if name == "probes":
            return LazyColumns(
                sorted({*one, *other}),
                lambda each: np.concatenate([_probe(first, each), _probe(second, each)]),
            )
        return np.concatenate([one, other])

    return LazyBlock.of(len(first) + len(second), column)


def _taken(column: Any, rows: NDArray[np.intp]) -> Any:
    """Of an array, places or histograms."""
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    return type(first).concatenate([first, second])


def _probe(block: Block, name: str) -> NDArray[np.float64]:
    held = block.probes.get(name)
    return np.full(len(block), np.nan) if held is None else held
