"""What follows from a catalogue alone, worked out once for each: the same object comes with one evaluation after another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from watchstep.tensors import TensorInfo

T = TypeVar("T")

_CATALOGUES = 64


class OfCatalogue(Generic[T]):
    """Values by catalogue and a further key, of the catalogues that came last. Thread-safe.

    A catalogue is known by being the same object: comparing or hashing hundreds of descriptions costs more than most of
    what is asked of them.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[int, tuple[tuple[TensorInfo, ...], dict[Hashable, T]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, catalogue: tuple[TensorInfo, ...], key: Hashable, make: Callable[[], T]) -> T:
        """The value for a catalogue and a key, made where there is none."""
        with self._lock:
            known = self._held.get(id(catalogue))
            if known is None or known[0] is not catalogue:
                # Holding the catalogue keeps its id from being given to another.
                known = self._held[id(catalogue)] = (catalogue, {})
                while len(self._held) > _CATALOGUES:
                    self._held.popitem(last=False)
            self._held.move_to_end(id(catalogue))
            values = known[1]
            if key in values:
                return values[key]
        value = make()
        with self._lock:
            return values.setdefault(key, value)
