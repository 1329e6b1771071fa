"""What follows from a catalogue alone, worked out once for each: the same object comes with one evaluation after another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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
