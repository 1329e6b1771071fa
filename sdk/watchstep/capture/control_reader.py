"""The worker's view of its control document: from the service's answers, or from the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from watchstep.capture.health import Health
from watchstep.control import MAX_BYTES, ControlDocument
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.layout import CONTROL_DOCUMENT
from watchstep.store import Store


class ControlReader:
    """Keeps the newest document seen, and tells of each newer one. On the writer's thread, but for `look`.

    Attributes:
        attempt: the attempt that this worker claimed; empty before that.
        document: the newest document.
        relay: told of each newer document, for other ranks.
    """

    def __init__(
        self, changed: Callable[[ControlDocument, str], None], health: Health, interval: float
    ) -> None:
        self._changed = changed
        self._health = health
        self._interval = interval
        self._next = 0.0
        self._taking = threading.Lock()
        self._relayed = 0
        self.document = ControlDocument()
        self.attempt = ""
        self.relay: Callable[[ControlDocument], None] | None = None

    def accept(self, document: ControlDocument) -> None:
        """A document from the service; also puts off the next look at the store."""
        self._next = time.monotonic() + self._interval
        self._take(document)
        newest = self.document
        if newest.version > self._relayed:
            self._relayed = newest.version
            if self.relay is not None:
                self.relay(newest)

    def look(self, store: Store) -> None:
        """Look at the store now. On any thread; other ranks are told of what is found when the writer's next hears of it.

        Raises:
            StoreError, FormatError: there is no document, or it cannot be read.
        """
        self._take(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))

    def _take(self, document: ControlDocument) -> None:
        with self._taking:
            if document.version > self.document.version:
                self.document = document
                self._changed(document, self.attempt)

    def refresh(self, store: Store) -> None:
        """Look at the store, if no service has answered for a while."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        try:
            self.accept(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))
        except NotFoundError:
            return
        except (StoreError, FormatError) as error:
            self._health.fault("control document", error)
