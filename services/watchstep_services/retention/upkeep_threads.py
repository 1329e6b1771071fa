"""Upkeep of ended runs in threads of its own: a store that is slow or hangs delays no evaluation, no stop and no other project's upkeep."""

from __future__ import annotations

import logging
import threading

from watchstep_services.retention.upkeep import Upkept, upkeep
from watchstep_services.service import Service

_THREADS = 2

_log = logging.getLogger(__name__)


class UpkeepThreads:
    """Does what is due of ended runs, for each project in one thread at a time. Thread-safe.

    Args:
        service: whose runs.
        most: steps that a thread does before it ends.
    """

    def __init__(self, service: Service, most: int) -> None:
        self._service = service
        self._most = most
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()
        self._upkept = Upkept()

    def start(self) -> None:
        """Have threads look for what is due, as many as there may be. Never waits."""
        with self._lock:
            while not self._upkept.closed and len(self._running) < _THREADS:
                thread = threading.Thread(target=self._run, name="watchstep-upkeep", daemon=True)
                self._running.add(thread)
                thread.start()  # it waits for the lock before it ends

    def close(self) -> None:
        """Begin nothing more, and wait for the steps under way: the client's timeouts end each request."""
        self._upkept.closed = True
        with self._lock:
            threads = list(self._running)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        try:
            upkeep(self._service, self._most, self._upkept)
        except Exception:  # noqa: BLE001 - it says so; the next look follows
            _log.exception("the upkeep of ended runs failed")
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())
