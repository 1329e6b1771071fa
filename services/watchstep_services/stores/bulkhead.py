"""Bulkheads: a store that does not answer blocks one thread at most, and only its own runs.

A store that accepts a connection and says nothing blocks whoever asks it for as long as the client's timeouts allow, some
twenty seconds. Evaluations of runs there are postponed until a probe in a thread of its own gets a response. Other requests
wait for a bounded time and go on without the response, while the request itself goes on in its thread.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from watchstep.errors import NotFoundError, StoreError
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.core.telemetry import metrics

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
        self._hanging: dict[StoreRegistration, float] = {}
        self._probes: dict[StoreRegistration, threading.Thread] = {}

    @contextmanager
    def noted(self, store: StoreRegistration) -> Iterator[None]:
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

    def answers(self, store: StoreRegistration, probe: Callable[[], object]) -> bool:
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

    def retry_seconds(self, store: StoreRegistration) -> float:
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

    def _probe(self, store: StoreRegistration, probe: Callable[[], object]) -> None:
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


_Came = TypeVar("_Came")
_Else = TypeVar("_Else")

_MOST_LEFT = 8
"""Pieces of urgent work that may hang at one store before nothing more is begun there."""


class Bulkhead:
    """Asks stores, and waits for each only so long. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[StoreRegistration, threading.Thread] = {}
        self._slow: set[StoreRegistration] = set()
        self._urgent: dict[threading.Thread, StoreRegistration] = {}
        self._left: set[threading.Thread] = set()

    def ask(
        self, store: StoreRegistration, work: Callable[[], _Came], seconds: float, otherwise: _Else
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

    def ask_now(self, store: StoreRegistration, work: Callable[[], _Came], seconds: float) -> _Came:
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
        hint = "see whether it can be reached from here; it is tried again"
        with self._lock:
            if sum(self._urgent[left] == store for left in self._left) >= _MOST_LEFT:
                raise StoreError(f"store {store.url}: has not answered for a while", hint)
            self._urgent[thread] = store
            thread.start()
        wait([came], seconds)
        with self._lock:
            if came.cancel():
                self._left.add(thread)
                raise StoreError(f"store {store.url}: no answer for {seconds:g} s", hint)
        return came.result()

    def close(self) -> None:
        """Wait for what is being asked; the client's timeouts end it."""
        with self._lock:
            threads = [*self._busy.values(), *self._urgent]
        for thread in threads:
            thread.join()

    def _do(
        self, store: StoreRegistration, work: Callable[[], _Came], seconds: float, came: Future[_Came]
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

    def _do_now(self, store: StoreRegistration, work: Callable[[], _Came], came: Future[_Came]) -> None:
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
