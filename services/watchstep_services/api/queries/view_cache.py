"""A cache of encoded views, of bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from watchstep_services.api.queries.forms import View

_MAX_BYTES = 128 * 1024 * 1024
"""Memory for encoded views of one process: some twenty of the largest heatmaps, or thousands of series."""

_SHARE = 4
"""A view that takes more than this part of the memory is not cached."""


class ViewCache:
    """Recently sent views by their ETag, of bounded memory. Thread-safe.

    An ETag covers the project and the run, so that no other one receives a view.

    Args:
        max_bytes: memory of all views.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._limit = max_bytes
        self._views: OrderedDict[str, View] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, etag: str) -> View | None:
        """Return a view; None if it is not cached."""
        with self._lock:
            if etag in self._views:
                self._views.move_to_end(etag)
            return self._views.get(etag)

    def add(self, etag: str, view: View) -> None:
        """Add a view, and remove those that were not used for the longest time."""
        with self._lock:
            if etag in self._views or _SHARE * len(view.content) > self._limit:
                return
            self._views[etag] = view
            self._bytes += len(view.content)
            while self._bytes > self._limit:
                _, oldest = self._views.popitem(last=False)
                self._bytes -= len(oldest.content)
