"""Stores that do not answer evaluations: runs there are postponed until a probe in a thread of its own gets an answer.

A store that accepts a connection and says nothing holds an evaluation for as long as the client's timeouts allow, some twenty seconds. Where
many runs at such a store are due, all workers would be held at once, again and again, and runs at other stores would wait for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from watchstep.errors import NotFoundError, StoreError
from watchstep_services.stores.place import Registration

RETRY_SECONDS = 2.0
"""So long after it was postponed a run at a hanging store is due again."""

_HANGS_SECONDS = 2.0
"""A store that fails sooner holds nobody: it refuses, and is asked again by each evaluation."""

_log = logging.getLogger(__name__)


class HangingStores:
    """Stores at which an evaluation of this process failed after it had waited. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: set[Registration] = set()
        self._probes: dict[Registration, threading.Thread] = {}

    @contextmanager
    def noted(self, store: Registration) -> Iterator[None]:
        """In the ``with`` block a store is used; if that raises `StoreError` after some seconds, the store hangs."""
        began = time.monotonic()
        try:
            yield
        except StoreError as error:
            waited = time.monotonic() - began >= _HANGS_SECONDS
            if waited and not (store.is_local or isinstance(error, NotFoundError)):
                with self._lock:
                    self._hanging.add(store)
                _log.warning("store %s: does not answer; its runs are postponed until it does", store.url)
            raise

    def answers(self, store: Registration, probe: Callable[[], object]) -> bool:
        """Whether the store may be used. Never waits.

        Of a store that hangs, a probe runs in a thread of its own, one at a time. As soon as it gets an answer the store counts as
        answering again, however long the answer took.

        Args:
            store: which one.
            probe: asks it for anything; raises `NotFoundError`, which is an answer, or another `StoreError`.
        """
        with self._lock:
            if store not in self._hanging:
                return True
            if store not in self._probes:
                thread = threading.Thread(
                    target=self._probe, args=(store, probe), name="watchstep-probe", daemon=True
                )
                self._probes[store] = thread
                thread.start()
            return False

    def close(self) -> None:
        """Wait for the probes; the client's timeouts end them."""
        with self._lock:
            threads = list(self._probes.values())
        for thread in threads:
            thread.join()

    def _probe(self, store: Registration, probe: Callable[[], object]) -> None:
        answered = False
        try:
            probe()
            answered = True
        except NotFoundError:
            answered = True
        except Exception as error:  # noqa: BLE001 - the next evaluation asks again, and tells what is wrong then
            _log.info("store %s: does not answer yet: %s", store.url, error)
        with self._lock:
            del self._probes[store]
            if answered:
                self._hanging.discard(store)
        if answered:
            _log.warning("store %s: answers again", store.url)
