"""Selection of tensors: by role, by name pattern and by kind of layer, computed once for each catalogue.

The same catalogue object occurs in one evaluation after another, so `CatalogueCache` computes what follows from it once. Name patterns
use RE2, which matches in time linear in the name for every pattern; Python's ``re`` can take years over thirty characters and holds the
interpreter lock meanwhile. See https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import re2
from numpy.typing import NDArray

from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import TensorInfo

T = TypeVar("T")

_CATALOGUES = 64
_MOST_BYTES = 256 * 1024 * 1024
"""Of memory for the catalogues: a segment of some kilobytes can bring one of a hundred megabytes."""


@dataclass
class _Entry(Generic[T]):
    catalogue: tuple[TensorInfo, ...]
    bytes: int
    values: dict[Hashable, T] = field(default_factory=dict)


class OfCatalogue(Generic[T]):
    """Values by catalogue and a further key, of the catalogues that came last. Thread-safe.

    A catalogue is known by being the same object: comparing or hashing hundreds of descriptions costs more than most of
    what is asked of them. They stay in memory up to a total size; values of one that alone takes half of it are made each time.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._entries: OrderedDict[int, _Entry[T]] = OrderedDict()
        self._most = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, catalogue: tuple[TensorInfo, ...], key: Hashable, make: Callable[[], T]) -> T:
        """The value for a catalogue and a key, made where there is none."""
        with self._lock:
            entry = self._entries.get(id(catalogue))
            if entry is None or entry.catalogue is not catalogue:
                entry = self._added(catalogue)
            else:
                self._entries.move_to_end(id(catalogue))
            if key in entry.values:
                return entry.values[key]
        value = make()
        with self._lock:
            return entry.values.setdefault(key, value)

    def _added(self, catalogue: tuple[TensorInfo, ...]) -> _Entry[T]:
        entry: _Entry[T] = _Entry(catalogue, sum(info.memory for info in catalogue))
        if 2 * entry.bytes > self._most:
            return entry
        # Holding the catalogue keeps its id from being given to another.
        self._entries[id(catalogue)] = entry
        self._bytes += entry.bytes
        while len(self._entries) > _CATALOGUES or self._bytes > self._most:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.bytes
        return entry


_flags: OfCatalogue[NDArray[np.bool_]] = OfCatalogue()


def tensors_where(
    catalogue: tuple[TensorInfo, ...], holds: Callable[..., Any], *more: Hashable
) -> NDArray[np.bool_]:
    """A flag for each tensor of a catalogue, bool of shape (tensors,); not to be changed.

    Args:
        catalogue: the tensors.
        holds: called with a tensor and ``more``; a function of a module, for what it said is remembered by it.
        more: further arguments.
    """
    return _flags.get(
        catalogue, (holds, more), lambda: np.array([bool(holds(info, *more)) for info in catalogue], np.bool_)
    )


def rows_where(block: Block, holds: Callable[..., Any], *more: Hashable) -> NDArray[np.bool_]:
    """A flag for each row of a block, bool of shape (n,): those of its tensor, as `tensors_where` gives them."""
    return tensors_where(block.catalogue, holds, *more)[block.tensor]


def has_role(info: TensorInfo, *roles: str) -> bool:
    """Whether a tensor has one of some roles."""
    return info.role in roles


def is_matrix_of(info: TensorInfo, role: str) -> bool:
    """Whether a tensor has a role, and more than one dimension."""
    return info.role == role and len(info.shape) > 1


LONGEST = 1000
"""Characters of an expression."""

MOST_REPEATS = 1000
"""Of ``x{n}``; RE2 takes no more, and takes a count that no integer holds as plain text."""

_MEMORY = 1 << 20
"""Bytes that one compiled expression may take."""

_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_AROUND = re.compile(r"\(\?(?:[=!>]|<[=!])|\(\?P=|\(\?\(|\\[1-9]|invalid perl operator")


def check(pattern: str) -> None:
    """See that an expression can be used.

    Raises:
        ValueError: it is too long, or RE2 does not take it; the message says what to write instead.
    """
    if len(pattern) > LONGEST:
        raise ValueError(
            f"a regular expression of {len(pattern)} characters, over the limit of {LONGEST}: "
            "narrow by collection, or use several rule configs"
        )
    if any(
        len(count.lstrip("0")) > len(str(MOST_REPEATS))
        for found in _COUNT.findall(pattern)
        for count in found
    ):
        raise ValueError(
            f"not a regular expression: it repeats more than {MOST_REPEATS} times; write '*' or '+'"
        )
    _compiled(pattern)


def matches(pattern: str, name: str) -> bool:
    """Whether an expression matches a name from its start.

    Raises:
        ValueError: it is none.
    """
    return _compiled(pattern).match(name.encode(errors="replace")) is not None


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    try:
        return re2.compile(pattern.encode(), options)
    except UnicodeEncodeError as error:
        raise ValueError("not a regular expression: half a surrogate pair stands in it") from error
    except re2.error as error:
        raise ValueError(f"not a regular expression: {_in_words(error)}{_hint(pattern)}") from error


def _in_words(error: Exception) -> str:
    """RE2 gives its messages as bytes."""
    said = error.args[0] if error.args else "it cannot be read"
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _hint(pattern: str) -> str:
    if "\\Z" in pattern:
        return "; write '\\z' for the end"
    if _AROUND.search(pattern):
        return (
            "; the syntax is RE2's, without lookaheads and backreferences: use 'exclude' beside 'include', "
            "or name both cases with '|'"
        )
    return "; the syntax is RE2's: put '\\' before a character that stands for itself"


_orders_of: OfCatalogue[NDArray[np.int64]] = OfCatalogue()
_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")


def is_weighted(info: TensorInfo) -> bool:
    """Whether the module multiplies its input by weights: linear, convolution, recurrent."""
    kind = info.module_type.removeprefix("Lazy").removeprefix("NonDynamicallyQuantizable")
    return kind.startswith(_WEIGHTED)


def is_normalisation(info: TensorInfo) -> bool:
    """Whether the module normalises: ``BatchNorm2d``, ``LayerNorm``, ``LlamaRMSNorm``."""
    return "Norm" in info.module_type


def orders(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """Where in the model each tensor stands."""
    return _orders_of.get(catalogue, "", lambda: np.array([info.order for info in catalogue], np.int64))


class _LastLayer(NamedTuple):
    """The weighted layer that was computed last at each row's step and worker.

    ``time_ns``: when, shape (n,); -1 where no weighted layer was recorded. ``order``: where in the model it stands, shape (n,).
    """

    time_ns: NDArray[np.int64]
    order: NDArray[np.int64]


def after_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows of outputs were computed after the last weighted layer of their step and worker; bool, shape of ``rows``.

    What was computed at the same nanosecond is told apart by its place in the model. Where no weighted layer was recorded at the step none is.
    """
    last, order = _last_layer(block, rows), orders(block.catalogue)[block.tensor[rows]]
    time_ns = block.time_ns[rows]
    after: NDArray[np.bool_] = (last.time_ns >= 0) & (
        (time_ns > last.time_ns) | ((time_ns == last.time_ns) & (order > last.order))
    )
    return after


def before_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows of outputs were computed before the last weighted layer of their step and worker; bool, shape of ``rows``.

    As with `after_last_layer`, none is where no weighted layer was recorded at the step.
    """
    last, order = _last_layer(block, rows), orders(block.catalogue)[block.tensor[rows]]
    time_ns = block.time_ns[rows]
    before: NDArray[np.bool_] = (time_ns < last.time_ns) | ((time_ns == last.time_ns) & (order < last.order))
    return before


def _last_layer(block: Block, rows: NDArray[np.intp]) -> _LastLayer:
    _, group = np.unique(sort_key(block.step, block.worker), return_inverse=True)
    group = group.reshape(-1)
    groups = int(group.max()) + 1 if len(group) else 0
    layers = np.flatnonzero(rows_where(block, _is_output_of_layer))
    order = orders(block.catalogue)[block.tensor]
    last_ns, last_order = np.full(groups, -1, np.int64), np.full(groups, -1, np.int64)
    np.maximum.at(last_ns, group[layers], block.time_ns[layers])
    newest = layers[block.time_ns[layers] == last_ns[group[layers]]]
    np.maximum.at(last_order, group[newest], order[newest])
    return _LastLayer(last_ns[group[rows]], last_order[group[rows]])


def _is_output_of_layer(info: TensorInfo) -> bool:
    return info.role == "output" and is_weighted(info)


_EXPERT = re.compile(r"([^.]*expert[^.]*\.)\d+(\.)", re.IGNORECASE)


@functools.lru_cache(maxsize=1 << 14)
def kind_of_expert(name: str) -> str:
    """The name of an expert's tensor without the expert's number; empty where it is of none."""
    kind, experts = _EXPERT.subn(r"\1*\2", name)
    return kind if experts else ""


@functools.lru_cache(maxsize=1 << 14)
def expert_of(name: str) -> str:
    """The path of the expert that a tensor belongs to, the innermost; empty where it is of none."""
    ends = [found.end() for found in _EXPERT.finditer(name)]
    return name[: ends[-1] - 1] if ends else ""
