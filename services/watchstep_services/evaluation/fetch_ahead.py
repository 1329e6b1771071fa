"""Fetch segments of several runs concurrently, before their evaluations begin.

An evaluation that does not find a segment here fetches it itself, with its own handling of absent segments and errors. So nothing here
is reported, and a store that does not answer delays a batch by `_FETCH_SECONDS` once: as long as requests to it are in progress, no
more are made.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from watchstep.errors import WatchstepError
from watchstep.format import layout
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.evaluation.collect import ReadAhead, fetch, run_store_of, segments_ahead
from watchstep_services.runs.claim import Claim
from watchstep_services.service.context import Service

_THREADS = 8
_FETCH_SECONDS = 0.5
"""Time for which segments are waited for."""

MOST_BYTES = 32 * 1024 * 1024
"""Limit of the fetched bytes of a batch. Requests in progress may exceed it by `_SEGMENT_BYTES` for each thread."""

_SEGMENT_BYTES = MOST_BYTES // _THREADS
"""Limit of a segment. Larger ones, far above what recorders write at an interval, are fetched by their evaluation."""

_SEGMENTS_OF_RUN = 8
"""Limit of segments of one run that are fetched ahead."""


class _Portion:
    """The segments of one batch. Thread-safe; closed when the batch begins, so that late answers are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._is_open = True
        self._lock = threading.Lock()

    def fetch(self, store: Store, key: SegmentKey, ahead: ReadAhead) -> None:
        """Fetch a segment unless the limit is reached or the portion is closed."""
        with self._lock:
            if self._room <= 0 or not self._is_open:
                return
        with suppress(WatchstepError):  # the evaluation fetches it again, and reports the error
            data = fetch(store, key, _SEGMENT_BYTES)
            with self._lock:
                if self._is_open:
                    self._room -= len(data)
                    ahead.objects[key.path] = data

    def close(self) -> None:
        """Accept no more segments."""
        with self._lock:
            self._is_open = False


class _Fetcher:
    """The threads of a process, and the number of requests in progress for each store."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="watchstep-fetch")
        self._late: Counter[StoreRegistration] = Counter()
        self._lock = threading.Lock()

    def fetch(self, service: Service, claims: Sequence[Claim], ahead: dict[int, ReadAhead]) -> None:
        portion = _Portion(MOST_BYTES)
        futures: dict[Future[None], StoreRegistration] = {}
        for claim in claims:
            registration = claim.place.registration
            with self._lock:
                if self._late[registration]:
                    continue
            inbox = ahead[claim.run_id].inbox
            if inbox is None or not _answers(service, claim):
                continue
            with suppress(WatchstepError):
                store = run_store_of(service, claim)
                for key in segments_ahead(service, claim, inbox)[:_SEGMENTS_OF_RUN]:
                    future = self._threads.submit(portion.fetch, store, key, ahead[claim.run_id])
                    futures[future] = registration
        _, late = wait(futures, _FETCH_SECONDS)
        portion.close()
        for future in late:
            if not future.cancel():
                self._wait_for(future, futures[future])

    def _wait_for(self, future: Future[None], registration: StoreRegistration) -> None:
        """Make no more requests to a store until a late one has ended."""
        with self._lock:
            self._late[registration] += 1
        future.add_done_callback(lambda _: self._ended(registration))

    def _ended(self, registration: StoreRegistration) -> None:
        with self._lock:
            self._late[registration] -= 1
            if not self._late[registration]:
                del self._late[registration]


def _answers(service: Service, claim: Claim) -> bool:
    def probe() -> None:
        run_store_of(service, claim).get(layout.RUN_DOCUMENT)

    return service.hanging_stores.answers(claim.place.registration, probe)


@functools.lru_cache(maxsize=1)
def _fetcher_of(process: int) -> _Fetcher:  # noqa: ARG001 - the cache's key: a forked child does not have its parent's threads
    return _Fetcher()


def fetch_ahead(service: Service, claims: Sequence[Claim], ahead: dict[int, ReadAhead]) -> None:
    """Fetch segments that the evaluations of claimed runs probably read; returns after `_FETCH_SECONDS` at the latest.

    Args:
        service: the service.
        claims: the claims, on stores that are not local.
        ahead: run id → what was read of the run; ``inbox`` is set, and ``objects`` is filled.
    """
    if claims:
        _fetcher_of(os.getpid()).fetch(service, claims, ahead)
