"""Catalogues that came with the last segments: one segment after another brings the same, and it becomes the same object."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from watchstep.tensors import TensorInfo

_MOST_TEXT = 32 * 1024 * 1024

Catalogue = tuple[TensorInfo, ...]


class KnownCatalogues:
    """Catalogues by their packed bytes, those that were asked for last. Thread-safe.

    They are kept up to a total of their unpacked text, so that small bytes that unpack to much take no memory for long.
    """

    def __init__(self, most_text: int = _MOST_TEXT) -> None:
        self._most = most_text
        self._held: OrderedDict[bytes, tuple[int, Catalogue]] = OrderedDict()
        self._text = 0
        self._lock = threading.Lock()

    def get(self, packed: bytes, unpack: Callable[[bytes], tuple[int, Catalogue]]) -> Catalogue:
        """The catalogue of these bytes.

        Args:
            packed: as a segment holds it.
            unpack: gives how long its text is, in bytes, and the catalogue; what it raises is raised.
        """
        with self._lock:
            if packed in self._held:
                self._held.move_to_end(packed)
                return self._held[packed][1]
        size, catalogue = unpack(packed)
        if 8 * size > self._most:
            return catalogue
        with self._lock:
            if packed in self._held:
                return self._held[packed][1]
            self._held[packed] = (size, catalogue)
            self._text += size
            while self._text > self._most:
                _, (gone, _) = self._held.popitem(last=False)
                self._text -= gone
        return catalogue
