"""Stores that do not answer: whoever asks one waits for a while, and goes on without it; what was asked goes on in a thread.

A store that accepts a connection and says nothing holds whoever asks it for as long as the client's timeouts allow, request after
request. A store is asked one thing at a time here, so that it holds one thread of a process at the most.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from watchstep.errors import StoreError
from watchstep_services import metrics
from watchstep_services.stores.place import Registration

_Came = TypeVar("_Came")
_Else = TypeVar("_Else")

_MOST_LEFT = 8
"""Pieces of urgent work that may hang at one store before nothing more is begun there."""

_log = logging.getLogger(__name__)


class Patience:
    """Asks stores, and waits for each only so long. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[Registration, threading.Thread] = {}
        self._slow: set[Registration] = set()
        self._urgent: dict[threading.Thread, Registration] = {}
        self._left: set[threading.Thread] = set()

    def ask(
        self, store: Registration, work: Callable[[], _Came], seconds: float, otherwise: _Else
    ) -> _Came | _Else:
        """What a piece of work at a store comes to; raises what it raises.

        Work that takes longer than so many seconds goes on in its thread. Until it ends, the store is asked nothing else; and until
        some work at the store ends in time, nobody waits for that either. A folder of this machine is asked at once, in the
        thread that asks.

        Args:
            store: which one.
            work: asks it; may go on when nobody waits any more, and then tells what goes wrong by itself.
            seconds: how long to wait.
            otherwise: what to return where the work has not ended, or has not begun.
        """
        if store.is_local:
            return work()
        came: Future[_Came] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if store in self._busy:
                return otherwise
            thread = threading.Thread(
                target=context.run,
                args=(self._do, store, work, seconds, came),
                name="watchstep-store",
                daemon=True,
            )
            self._busy[store] = thread
            waited = 0.0 if store in self._slow else seconds
            thread.start()
        wait([came], waited)
        with self._lock:
            if came.cancel():  # which tells the thread that nobody hears how it ends
                if store not in self._slow:
                    _log.warning(
                        "store %s: no answer for %g s; others are asked meanwhile", store.url, waited
                    )
                    metrics.SWEEP_FAULTS.labels("store").inc()
                self._slow.add(store)
                return otherwise
        return came.result()

    def ask_now(self, store: Registration, work: Callable[[], _Came], seconds: float) -> _Came:
        """What urgent work at a store comes to, whatever else the store is asked meanwhile; raises what it raises.

        Work that takes longer than so many seconds goes on in its thread. While a lot of it hangs, no more is begun.

        Args:
            store: which one.
            work: asks it; may go on when nobody waits any more.
            seconds: how long to wait.

        Raises:
            StoreError: the store has not answered by then.
        """
        if store.is_local:
            return work()
        came: Future[_Came] = Future()
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._do_now, store, work, came), name="watchstep-store", daemon=True
        )
        mend = "see whether it can be reached from here; it is tried again"
        with self._lock:
            if sum(self._urgent[left] == store for left in self._left) >= _MOST_LEFT:
                raise StoreError(f"store {store.url}: has not answered for a while", mend)
            self._urgent[thread] = store
            thread.start()
        wait([came], seconds)
        with self._lock:
            if came.cancel():
                self._left.add(thread)
                raise StoreError(f"store {store.url}: no answer for {seconds:g} s", mend)
        return came.result()

    def close(self) -> None:
        """Wait for what is being asked; the client's timeouts end it."""
        with self._lock:
            threads = [*self._busy.values(), *self._urgent]
        for thread in threads:
            thread.join()

    def _do(
        self, store: Registration, work: Callable[[], _Came], seconds: float, came: Future[_Came]
    ) -> None:
        began = time.monotonic()
        result: _Came | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            failed = error
        with self._lock:
            if time.monotonic() - began <= seconds:
                self._slow.discard(store)
            if not came.cancelled():
                del self._busy[store]
                if failed is not None:
                    came.set_exception(failed)
                else:
                    came.set_result(result)  # type: ignore[arg-type]
                return
        if failed is not None:
            _log.warning("store %s: what was asked of it failed late: %s", store.url, failed)
        with self._lock:
            del self._busy[store]

    def _do_now(self, store: Registration, work: Callable[[], _Came], came: Future[_Came]) -> None:
        result: _Came | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            failed = error
        with self._lock:
            thread = threading.current_thread()
            del self._urgent[thread]
            self._left.discard(thread)
            if not came.cancelled():
                if failed is not None:
                    came.set_exception(failed)
                else:
                    came.set_result(result)  # type: ignore[arg-type]
            elif failed is not None:
                _log.warning("store %s: what was asked of it failed late: %s", store.url, failed)
