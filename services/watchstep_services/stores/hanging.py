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

_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 20.0
_RETRY_SHARE = 0.2
"""Of the time that a store has hung: thousands of runs that are due every two seconds would keep workers busy with nothing."""

_HANGS_SECONDS = 2.0
"""A store that fails sooner holds up no worker: it refuses, and each evaluation asks it again."""

_now = time.monotonic
_log = logging.getLogger(__name__)


class HangingStores:
    """Stores at which an evaluation of this process failed after it had waited. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: dict[Registration, float] = {}
        self._probes: dict[Registration, threading.Thread] = {}

    @contextmanager
    def noted(self, store: Registration) -> Iterator[None]:
        """In the ``with`` block a store is used; if that raises `StoreError` after some seconds, the store hangs."""
        began = _now()
        try:
            yield
        except StoreError as error:
            waited = _now() - began >= _HANGS_SECONDS
            if waited and not (store.is_local or isinstance(error, NotFoundError)):
                with self._lock:
                    self._hanging.setdefault(store, _now())
                _log.warning("store %s: its runs are postponed until it answers: %s", store.url, error)
            raise

    def answers(self, store: Registration, probe: Callable[[], object]) -> bool:
        """Whether the store may be used. Never waits.

        Of a store that hangs, a probe runs in a thread of its own, one at a time. As soon as it gets an answer, however
        late, or is refused at once, the store counts as answering again.

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
                try:
                    thread.start()  # it waits for the lock before it ends
                except RuntimeError as error:
                    _log.warning("store %s: cannot be asked now: %s", store.url, error)
                else:
                    self._probes[store] = thread
            return False

    def retry_seconds(self, store: Registration) -> float:
        """In how many seconds a postponed run at the store is due again: 2 to 20, the longer the store has hung."""
        with self._lock:
            hung = _now() - self._hanging.get(store, _now())
        return min(_LONGEST_RETRY_SECONDS, max(_RETRY_SECONDS, _RETRY_SHARE * hung))

    def close(self) -> None:
        """Wait for the probes; the client's timeouts end them."""
        with self._lock:
            threads = list(self._probes.values())
        for thread in threads:
            thread.join()

    def _probe(self, store: Registration, probe: Callable[[], object]) -> None:
        began = _now()
        answered = False
        try:
            probe()
            answered = True
        except NotFoundError:
            answered = True
        except Exception as error:  # noqa: BLE001 - the next evaluation asks again, and reports what is wrong
            # What refuses at once holds up no worker: evaluations are to report the reason.
            answered = _now() - began < _HANGS_SECONDS
            _log.info("store %s: a probe failed: %s", store.url, error)
        with self._lock:
            del self._probes[store]
            if answered:
                self._hanging.pop(store, None)
        if answered:
            _log.warning("store %s: answers again", store.url)
