"""The worker's view of its control document: from the service's answers, or from the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from watchstep.capture.health import RecorderHealth
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format.control import MAX_BYTES, ControlDocument
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.store.store import Store

TOMBSTONE = "tombstone"
"""The note in health that nobody knows yet whether the run was stopped for good."""


class ControlReader:
    """Keeps the newest document seen, and tells of each newer one. Thread-safe; the store is asked on the writer's thread, but by `look`.

    Until the store or the service has answered for the first time, health says that nobody knows whether the run was stopped for good.

    Attributes:
        document: the newest document.
        relay: told of each newer document, for other ranks.
    """

    def __init__(
        self, changed: Callable[[ControlDocument, str], None], health: RecorderHealth, interval: float
    ) -> None:
        self._changed = changed
        self._health = health
        self._interval = interval
        self._next = 0.0
        self._taking = threading.Lock()
        self._relayed = 0
        self._attempt = ""
        self._heard_as = ""
        self._unverified = True
        self.document = ControlDocument()
        self.relay: Callable[[ControlDocument], None] | None = None
        health.note(TOMBSTONE, "unverified: neither the store nor the service has answered yet")

    @property
    def attempt(self) -> str:
        """The attempt that this worker claimed; empty before that."""
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: str) -> None:
        with self._taking:
            self._attempt = attempt
            if self.document.version and self._heard_as != attempt:
                self._heard_as = attempt
                self._changed(self.document, attempt)

    def accept(self, document: ControlDocument) -> None:
        """A document from the service; also puts off the next look at the store."""
        self._next = time.monotonic() + self._interval
        self._take(document)
        with self._taking:
            newest = self.document
            is_new = newest.version > self._relayed
            self._relayed = max(self._relayed, newest.version)
            relay = self.relay
        if is_new and relay is not None:
            relay(newest)

    def hear(self, document: ControlDocument, attempt: str) -> None:
        """A document from the service, in the answer to a registration. On any thread.

        Args:
            document: the document.
            attempt: the attempt that was registered, where this worker has claimed none yet.
        """
        self._take(document, attempt)

    def look(self, store: Store) -> None:
        """Look at the store now. On any thread; other ranks are told of what is found when the writer's next hears of it.

        Raises:
            StoreError, FormatError: there is no document, or it cannot be read.
        """
        self._take(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))

    def verify(self, store: Store) -> None:
        """Look at the store for the first time, before anything is uploaded."""
        if self._unverified:
            self.refresh(store)

    def verified(self) -> None:
        """The store or the service has answered: whether the run was stopped for good is known."""
        if self._unverified:
            self._unverified = False
            self._health.withdraw(TOMBSTONE)

    def _take(self, document: ControlDocument, attempt: str = "") -> None:
        self.verified()
        with self._taking:
            if document.version > self.document.version:
                self.document = document
                self._heard_as = self._attempt or attempt
                self._changed(document, self._heard_as)

    def refresh(self, store: Store) -> None:
        """Look at the store, if no service has answered for a while."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        try:
            self.accept(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))
        except NotFoundError:
            self.verified()
        except (StoreError, FormatError) as error:
            self._health.fault("control document", error)
