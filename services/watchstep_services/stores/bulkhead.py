"""Bulkheads: a store that does not answer blocks at most one thread, and only its own runs.

A store that accepts a connection and does not answer blocks the caller for the client's timeouts, about
twenty seconds. Evaluations of its runs are postponed until a probe in a separate thread gets an answer. Other calls
wait for a limited time and continue without the answer, while the call itself continues in its thread.
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
"""Pause as a share of the time that a store has hung; otherwise thousands of runs due every two seconds would occupy the workers."""

_HANGS_SECONDS = 2.0
"""A store that fails sooner does not hang: it refuses, blocks no worker, and is tried by each evaluation."""

_now = time.monotonic
_log = logging.getLogger(__name__)


class HangingStores:
    """Stores at which an evaluation of this process failed after waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: dict[StoreRegistration, float] = {}
        self._probes: dict[StoreRegistration, threading.Thread] = {}

    @contextmanager
    def noted(self, store: StoreRegistration) -> Iterator[None]:
        """Context in which a store is used; if it raises `StoreError` after some seconds, the store hangs."""
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

        A hanging store is probed in a separate thread, one probe at a time. Once a probe gets an answer, however
        late, or is refused at once, the store answers again.

        Args:
            store: the store.
            probe: makes any request; raises `NotFoundError`, which is an answer, or another `StoreError`.
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
                    _log.warning("store %s: cannot be probed now: %s", store.url, error)
                else:
                    self._probes[store] = thread
            return False

    def retry_seconds(self, store: StoreRegistration) -> float:
        """Seconds until a postponed run at the store is due again: 2 to 20, growing with the time that the store has hung."""
        with self._lock:
            hung = _now() - self._hanging.get(store, _now())
        return min(_LONGEST_RETRY_SECONDS, max(_RETRY_SECONDS, _RETRY_SHARE * hung))

    def close(self) -> None:
        """Wait for the probes, which the client's timeouts end."""
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
        except Exception as error:  # noqa: BLE001 - the next evaluation tries again, and reports the error
            # A store that refuses at once blocks no worker, and evaluations report the reason.
            answered = _now() - began < _HANGS_SECONDS
            _log.info("store %s: a probe failed: %s", store.url, error)
        with self._lock:
            del self._probes[store]
            if answered:
                self._hanging.pop(store, None)
        if answered:
            _log.warning("store %s: answers again", store.url)


_Result = TypeVar("_Result")
_Default = TypeVar("_Default")

_MOST_ABANDONED = 8
"""Urgent calls that may hang at one store before no more are made."""


class Bulkhead:
    """Calls stores with a time limit for the caller. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[StoreRegistration, threading.Thread] = {}
        self._slow: set[StoreRegistration] = set()
        self._urgent: dict[threading.Thread, StoreRegistration] = {}
        self._abandoned: set[threading.Thread] = set()

    def call(
        self, store: StoreRegistration, work: Callable[[], _Result], seconds: float, default: _Default
    ) -> _Result | _Default:
        """The result of work at a store; raises its exceptions.

        Work that exceeds the limit continues in its thread. Until it ends, no other work is done at the store; and until
        some work at the store ends in time, callers do not wait. Work at a local folder is done in the caller's
        thread.

        Args:
            store: the store.
            work: uses the store; may continue after the caller has left, and then logs its own errors.
            seconds: how long to wait.
            default: the result if the work has not ended, or has not begun.
        """
        if store.is_local:
            return work()
        future: Future[_Result] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if store in self._busy:
                return default
            thread = threading.Thread(
                target=context.run,
                args=(self._do, store, work, seconds, future),
                name="watchstep-store",
                daemon=True,
            )
            self._busy[store] = thread
            waited = 0.0 if store in self._slow else seconds
            thread.start()
        wait([future], waited)
        with self._lock:
            if future.cancel():  # the thread then logs its own error
                if store not in self._slow:
                    _log.warning(
                        "store %s: no answer for %g s; other stores are used meanwhile", store.url, waited
                    )
                    metrics.SWEEP_FAULTS.labels("store").inc()
                self._slow.add(store)
                return default
        return future.result()

    def call_urgent(self, store: StoreRegistration, work: Callable[[], _Result], seconds: float) -> _Result:
        """The result of urgent work at a store, whatever other work is done there; raises its exceptions.

        Work that exceeds the limit continues in its thread. While many such calls hang, no more are made.

        Args:
            store: the store.
            work: uses the store; may continue after the caller has left.
            seconds: how long to wait.

        Raises:
            StoreError: the store has not answered in time.
        """
        if store.is_local:
            return work()
        future: Future[_Result] = Future()
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(self._do_urgent, store, work, future),
            name="watchstep-store",
            daemon=True,
        )
        hint = "check that it can be reached from the service's machine; it is tried again"
        with self._lock:
            if sum(self._urgent[abandoned] == store for abandoned in self._abandoned) >= _MOST_ABANDONED:
                raise StoreError(f"store {store.url}: has not answered for a while", hint)
            self._urgent[thread] = store
            thread.start()
        wait([future], seconds)
        with self._lock:
            if future.cancel():
                self._abandoned.add(thread)
                raise StoreError(f"store {store.url}: no answer for {seconds:g} s", hint)
        return future.result()

    def close(self) -> None:
        """Wait for calls in progress, which the client's timeouts end."""
        with self._lock:
            threads = [*self._busy.values(), *self._urgent]
        for thread in threads:
            thread.join()

    def _do(
        self, store: StoreRegistration, work: Callable[[], _Result], seconds: float, future: Future[_Result]
    ) -> None:
        began = time.monotonic()
        result: _Result | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            failed = error
        with self._lock:
            if time.monotonic() - began <= seconds:
                self._slow.discard(store)
            if not future.cancelled():
                del self._busy[store]
                if failed is not None:
                    future.set_exception(failed)
                else:
                    future.set_result(result)  # type: ignore[arg-type]
                return
        if failed is not None:
            _log.warning("store %s: a call failed after its caller had left: %s", store.url, failed)
        with self._lock:
            del self._busy[store]

    def _do_urgent(
        self, store: StoreRegistration, work: Callable[[], _Result], future: Future[_Result]
    ) -> None:
        result: _Result | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            failed = error
        with self._lock:
            thread = threading.current_thread()
            del self._urgent[thread]
            self._abandoned.discard(thread)
            if not future.cancelled():
                if failed is not None:
                    future.set_exception(failed)
                else:
                    future.set_result(result)  # type: ignore[arg-type]
            elif failed is not None:
                _log.warning("store %s: a call failed after its caller had left: %s", store.url, failed)
