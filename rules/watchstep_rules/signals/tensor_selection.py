"""Selection of tensors: by role, by name pattern and by kind of layer, computed once for each catalogue.

The same catalogue object occurs in many evaluations, so `CatalogueCache` computes derived values once. Name patterns
use RE2, which matches in time linear in the name for every pattern; Python's ``re`` can take years over thirty characters and holds the
interpreter lock meanwhile. See https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
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
"""Limit of memory for the catalogues: a segment of a few kilobytes can contain a catalogue of a hundred megabytes."""


@dataclass
class _Entry(Generic[T]):
    catalogue: tuple[TensorInfo, ...]
    bytes: int
    values: dict[Hashable, T] = field(default_factory=dict)


class CatalogueCache(Generic[T]):
    """A cache of values by catalogue and a further key, for the most recently used catalogues. Thread-safe.

    A catalogue is identified by object identity, because comparing or hashing hundreds of descriptions costs more than most of the
    values. The total size is bounded; values of a catalogue that takes more than half of it are computed on each call.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._entries: OrderedDict[int, _Entry[T]] = OrderedDict()
        self._most = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, catalogue: tuple[TensorInfo, ...], key: Hashable, make: Callable[[], T]) -> T:
        """The value for a catalogue and a key; ``make`` is called if it is not cached."""
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
        # The reference to the catalogue keeps its id from being reused.
        self._entries[id(catalogue)] = entry
        self._bytes += entry.bytes
        while len(self._entries) > _CATALOGUES or self._bytes > self._most:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.bytes
        return entry


_flags: CatalogueCache[NDArray[np.bool_]] = CatalogueCache()


def tensors_where(
    catalogue: tuple[TensorInfo, ...], predicate: Callable[..., Any], *arguments: Hashable
) -> NDArray[np.bool_]:
    """A flag for each tensor of a catalogue, bool of shape (tensors,); the result is cached and must not be changed.

    Args:
        catalogue: the tensors.
        predicate: called with a tensor and ``arguments``. Pass a module-level function, because it is part of the cache key.
        arguments: further arguments of the predicate.
    """
    return _flags.get(
        catalogue,
        (predicate, arguments),
        lambda: np.array([bool(predicate(info, *arguments)) for info in catalogue], np.bool_),
    )


def rows_where(block: Block, predicate: Callable[..., Any], *arguments: Hashable) -> NDArray[np.bool_]:
    """A flag for each row of a block, bool of shape (n,): the flag of its tensor, as by `tensors_where`."""
    return tensors_where(block.catalogue, predicate, *arguments)[block.tensor]


def has_role(info: TensorInfo, *roles: str) -> bool:
    """Whether a tensor has one of the roles."""
    return info.role in roles


def is_matrix_of(info: TensorInfo, role: str) -> bool:
    """Whether a tensor has a role, and more than one dimension."""
    return info.role == role and len(info.shape) > 1


LONGEST = 1000
"""Limit of characters in a pattern."""

MOST_REPEATS = 1000
"""Limit of ``n`` in ``x{n}``. RE2 allows no more, and treats a count that does not fit an integer as plain text."""

_MEMORY = 1 << 20
"""Limit of bytes for one compiled pattern."""

_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_AROUND = re.compile(r"\(\?(?:[=!>]|<[=!])|\(\?P=|\(\?\(|\\[1-9]|invalid perl operator")


def check(pattern: str) -> None:
    """Check that a pattern is valid.

    Raises:
        ValueError: the pattern is too long or not valid in RE2; the message contains a hint.
    """
    if len(pattern) > LONGEST:
        raise ValueError(
            f"a regular expression of {len(pattern)} characters, over the limit of {LONGEST}: "
            "narrow by collection, or use several rule configs"
        )
    if any(
        len(count.lstrip("0")) > len(str(MOST_REPEATS))
        for counts in _COUNT.findall(pattern)
        for count in counts
    ):
        raise ValueError(
            f"not a valid regular expression: more than {MOST_REPEATS} repetitions; use '*' or '+'"
        )
    _compiled(pattern)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name from its start.

    Raises:
        ValueError: the pattern is not valid.
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
        raise ValueError("not a valid regular expression: it contains an unpaired surrogate") from error
    except re2.error as error:
        raise ValueError(f"not a valid regular expression: {_message(error)}{_hint(pattern)}") from error


def _message(error: Exception) -> str:
    """The message of an RE2 error, which is bytes."""
    message = error.args[0] if error.args else "it cannot be parsed"
    return message.decode(errors="replace") if isinstance(message, bytes) else str(message)


def _hint(pattern: str) -> str:
    if "\\Z" in pattern:
        return "; write '\\z' for the end"
    if _AROUND.search(pattern):
        return (
            "; RE2 syntax has no lookarounds and backreferences: combine 'include' and 'exclude', "
            "or list both cases with '|'"
        )
    return "; the syntax is RE2: escape a literal character with '\\'"


_orders_of: CatalogueCache[NDArray[np.int64]] = CatalogueCache()
_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")
_DENSE = frozenset({"Dense", "DenseGeneral", "EinsumDense"})
"""Classes of Flax and Keras. A prefix would include `DenseNet`."""


def is_weighted(info: TensorInfo) -> bool:
    """Whether the module multiplies its input by weights: linear, convolutional or recurrent."""
    kind = info.module_type.removeprefix("Lazy").removeprefix("NonDynamicallyQuantizable")
    return kind.startswith(_WEIGHTED) or kind in _DENSE


def is_normalization(info: TensorInfo) -> bool:
    """Whether the module normalises: ``BatchNorm2d``, ``LayerNorm``, ``LlamaRMSNorm``."""
    return "Norm" in info.module_type


def orders(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """The position of each tensor's module in the model, int64 of shape (tensors,)."""
    return _orders_of.get(catalogue, "", lambda: np.array([info.order for info in catalogue], np.int64))


class _LastLayer(NamedTuple):
    """The weighted layer that was computed last at each row's step and worker.

    ``time_ns``: its time, shape (n,); -1 if no weighted layer was recorded. ``order``: its position in the model, shape (n,).
    """

    time_ns: NDArray[np.int64]
    order: NDArray[np.int64]


def after_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows of outputs computed after the last weighted layer of their step and worker; bool, shape of ``rows``.

    Outputs with the same nanosecond are ordered by their position in the model. False if no weighted layer was recorded at the step.
    """
    last, order = _last_layer(block, rows), orders(block.catalogue)[block.tensor[rows]]
    time_ns = block.time_ns[rows]
    after: NDArray[np.bool_] = (last.time_ns >= 0) & (
        (time_ns > last.time_ns) | ((time_ns == last.time_ns) & (order > last.order))
    )
    return after


def before_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows of outputs computed before the last weighted layer of their step and worker; bool, shape of ``rows``.

    False if no weighted layer was recorded at the step, as in `after_last_layer`.
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


@functools.lru_cache(maxsize=1 << 14)
def kind_of_expert(name: str) -> str:
    """The name of an expert's tensor without the expert's number; empty if the tensor belongs to no expert."""
    parts = name.split(".")
    numbers = _expert_numbers(parts)
    for place in numbers:
        parts[place] = "*"
    return ".".join(parts) if numbers else ""


@functools.lru_cache(maxsize=1 << 14)
def expert_of(name: str) -> str:
    """The path of the innermost expert that a tensor belongs to; empty if it belongs to none."""
    parts = name.split(".")
    numbers = _expert_numbers(parts)
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _expert_numbers(parts: Sequence[str]) -> list[int]:
    """Places of the numbers that follow a part with the word "expert". A regular expression takes cubic time for a crafted name."""
    return [
        place
        for place in range(1, len(parts) - 1)
        if parts[place].isdecimal() and "expert" in parts[place - 1].lower()
    ]
