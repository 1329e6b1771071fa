"""Seeing the backlog onto the store: the claim first, then object by object in order, with pauses after a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from watchstep import documents
from watchstep.capture.backlog import Backlog
from watchstep.capture.claims import claim_attempt
from watchstep.capture.control_reader import ControlReader
from watchstep.capture.health import Health
from watchstep.capture.identity import Identity
from watchstep.capture.outgoing import Outgoing
from watchstep.capture.service_client import ServiceClient
from watchstep.errors import FormatError, NotFoundError, ServiceError, StoreError
from watchstep.layout import SegmentKey, WriterId, end_document
from watchstep.store import Store

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 10.0
_LONGEST_IN_HURRY = 0.5


@dataclass(frozen=True)
class Target:
    """Where a writer writes, who records, and the service, if there is one.

    Attributes:
        store_url: of the store, for whoever uploads later what this process could not.
        open_store: opens the store, seen from the run; called on the writer's thread until it succeeds.
        identity: who records.
        run: to make the run with.
        attempt: to claim the attempt with.
        service: where to announce.
    """

    store_url: str
    open_store: Callable[[], Store]
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    service: ServiceClient | None


class Uploader:
    """The only one that talks to the store and the service. On the writer's thread.

    Attributes:
        writer: what was claimed; None before that.
        end_written: how the worker ended lies on the store.
    """

    def __init__(self, target: Target, backlog: Backlog, control: ControlReader, health: Health) -> None:
        self._target = target
        self._backlog = backlog
        self._control = control
        self._health = health
        self._store: Store | None = None
        self._retry_at = 0.0
        self._backoff = _FIRST_BACKOFF
        self._longest = _LONGEST_BACKOFF
        self._failing_since: float | None = None
        self._registered = target.service is None
        self.writer: WriterId | None = None
        self.end_written = False

    @property
    def claimed(self) -> tuple[Store, str] | None:
        """The store and the attempt; None before the claim."""
        return (
            (self._store, self.writer.attempt)
            if self._store is not None and self.writer is not None
            else None
        )

    @property
    def failing_for(self) -> float | None:
        """For how many seconds the store has refused; None where it does not."""
        return None if self._failing_since is None else time.monotonic() - self._failing_since

    def hurry(self) -> None:
        """The process is about to end: try at once, and often."""
        self._retry_at, self._longest = 0.0, _LONGEST_IN_HURRY

    def turn(self) -> None:
        """Claim, upload what waits, look at the control document. The first refusal ends the turn.

        So that sequence numbers never arrive out of order.
        """
        if time.monotonic() < self._retry_at:
            return
        try:
            store, writer = self._claimed()
            while (head := self._backlog.head()) is not None:
                self._write(store, head, writer)
                self._retry_at, self._backoff = 0.0, _FIRST_BACKOFF
            self._failing_since = None
        except StoreError as error:
            self._failed(error)
        if self._store is not None and self.writer is not None:
            self._control.refresh(self._store)

    def _claimed(self) -> tuple[Store, WriterId]:
        target = self._target
        self._store = self._store or target.open_store()
        if self.writer is None:
            writer = claim_attempt(self._store, target.run, target.attempt, target.identity)
            self._backlog.claimed(writer)
            self._control.attempt = writer.attempt
            self.writer = writer
        return self._store, self.writer

    def _write(self, store: Store, item: Outgoing, writer: WriterId) -> None:
        key = item.place.key(writer)
        lies = write_whole(store, key.path, item.data)
        if not self._backlog.remove(item):
            return
        if not lies:
            self._health.count("overwritten_names")
            self._health.count("dropped_rows", item.place.rows)
            return
        self._health.count("objects")
        self._health.count("bytes", len(item.data))
        self._health.count("rows", item.place.rows)
        self._announce(key)

    def _failed(self, error: StoreError) -> None:
        self._health.fault("store", error)
        self._failing_since = self._failing_since or time.monotonic()
        self._retry_at = time.monotonic() + min(self._longest, self._backoff)
        self._backoff = min(self._longest, 2 * self._backoff)

    def _announce(self, key: SegmentKey) -> None:
        service = self._target.service
        if service is None:
            return
        try:
            if not self._registered:
                run = self._target.run
                service.register({"run": run.run, "attempt": key.writer.attempt, "rules": list(run.rules)})
                self._registered = True
            self._control.accept(service.announce(self._target.identity.run, key, self._health.as_data()))
        except ServiceError as error:
            self._health.fault("service", error)

    def write_end(self, end: documents.EndDocument) -> None:
        """Write how the worker ended, after everything else."""
        if self.writer is None or self._store is None:
            return
        try:
            put_end(self._store, self.writer.attempt, end)
            self.end_written = True
        except StoreError as error:
            self._failed(error)


def write_whole(store: Store, path: str, data: bytes) -> bool:
    """Write an object that may lie there already, for the answer to an earlier try was lost.

    Returns:
        Whether it lies there; False where another object has its name.

    Raises:
        StoreError: the store refused.
    """
    return store.create(path, data) or store.get(path, limit=len(data)) == data


def put_end(store: Store, attempt: str, end: documents.EndDocument) -> None:
    """Write how a worker ended, unless a later process of the same rank has said so.

    Raises:
        StoreError: the store refused.
    """
    key = end_document(attempt, end.worker)
    try:
        if store.create(key, documents.encode(end)):
            return
        there = documents.decode(documents.EndDocument, store.get(key, limit=documents.MAX_BYTES), key)
        if there.ended_ns >= end.ended_ns:
            return
    except (NotFoundError, FormatError):
        pass  # removed meanwhile, or none of ours: write it
    store.put(key, documents.encode(end))
