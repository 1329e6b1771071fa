"""A part of a compacted run: an object whose footer is read when a column of it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.arrow_arrays import from_codes, from_numbers
from watchstep.block import STAGES
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.reading.manifest import Part
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store import Store
from watchstep.tensors import MODES, TensorInfo

if TYPE_CHECKING:
    import pyarrow as pa

_WORDS: dict[str, tuple[str, ...]] = {"mode": MODES, "stage": STAGES}


class PartLostError(StoreError):
    """A part that its manifest names is gone or damaged: the run is to be read by another generation."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what, "compact the run again")
        self.key = key


class PartObject:
    """The same to a reader as a segment's `ParquetObject`."""

    def __init__(
        self, store: Store, part: Part, catalogue: tuple[TensorInfo, ...], catalogues: Catalogues
    ) -> None:
        self._store, self._part, self._catalogues = store, part, catalogues
        self._opened: ParquetObject | None = None
        self._lock = threading.Lock()
        self.key, self.rows, self.first, self.last = part.key, part.rows, part.first, part.last
        self.columns = frozenset(part.columns)
        self.constant = part.constant
        self.catalogue = tuple(catalogue[place] for place, _ in part.tensors)

    def decoded_bytes(self, columns: Iterable[str]) -> int:
        """Memory that some columns take once they are read.

        Raises:
            PartLostError: the object is gone, damaged, or another than the manifest says.
            StoreError: it cannot be read.
        """
        with self._found():
            return self._open().decoded_bytes(columns)

    def fetch(self, columns: Iterable[str]) -> Callable[[], pa.Table]:
        """Fetch some columns from the store.

        Returns:
            decodes them; raises `PartLostError` where the object is damaged.

        Raises:
            PartLostError: the object is gone, damaged, or another than the manifest says.
            StoreError: it cannot be read.
        """
        known = {*self._part.constant, "tensor"}
        wanted = set(columns)
        with self._found():
            decode = self._open().fetch((wanted - known) or {"step"})

        def table() -> pa.Table:
            with self._found():
                decoded = decode()
            for name in sorted(wanted & known):
                decoded = decoded.append_column(name, self._constant(name))
            return decoded

        return table

    @contextmanager
    def _found(self) -> Iterator[None]:
        try:
            yield
        except (FormatError, NotFoundError) as error:
            raise PartLostError(self.key, error.what) from error

    def places(self) -> NDArray[np.int32]:
        """Place in the part's own catalogue of each row's tensor; nothing is read."""
        counts = [rows for _, rows in self._part.tensors]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def _open(self) -> ParquetObject:
        with self._lock:
            if self._opened is None:
                opened = open_object(self._store, self.key, self._part.size, self._catalogues)
                if opened.rows != self.rows or not self.columns <= opened.columns:
                    raise FormatError(f"part {self.key}: not as the manifest says", "compact the run again")
                self._opened = opened
            return self._opened

    def _constant(self, name: str) -> Any:
        if name == "tensor":
            return from_codes(self.places(), [info.name for info in self.catalogue])
        values = np.full(self.rows, self.constant[name], np.int32)
        return from_codes(values, _WORDS[name]) if name in _WORDS else from_numbers(values)
