"""The writer: one background thread that encodes, uploads and announces what the training thread hands over."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - it cannot be imported, by pyarrow say, once the program ends
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from watchstep import documents
from watchstep.capture.bounded_queue import BoundedQueue, FinishedStep, Item, PendingSnapshot
from watchstep.capture.claims import claim_attempt
from watchstep.capture.config import Bounds
from watchstep.capture.control_reader import ControlReader
from watchstep.capture.health import Health
from watchstep.capture.identity import Identity
from watchstep.capture.record import join
from watchstep.capture.service_client import ServiceClient
from watchstep.errors import ServiceError, StoreError
from watchstep.layout import SegmentKey, SnapshotKey, WriterId, end_document
from watchstep.segment import catalogue_bytes, encode
from watchstep.store import Store
from watchstep.tensors import TensorInfo

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 10.0
_DENSE_SECONDS = 60.0
_LONGEST_FLUSH = 30.0
_HASTY_SECONDS = 5.0
_HASTY_PAUSE = 0.1
_MAX_ROWS = 50_000


@dataclass(frozen=True)
class _Encoded:
    """An object that waits for the store. A segment has a key, and is announced."""

    path: str
    data: bytes
    key: SegmentKey | None = None


@dataclass(frozen=True)
class Target:
    """Where a writer writes, who records, and the service, if there is one.

    Attributes:
        open_store: opens the store, seen from the run; called on the writer's thread until it succeeds.
        identity: who records.
        run: to make the run with.
        attempt: to claim the attempt with.
        service: where to announce.
    """

    open_store: Callable[[], Store]
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    service: ServiceClient | None


class Writer:
    """Takes finished steps, makes segments of them, and sees them onto the store in order."""

    def __init__(
        self, target: Target, queue: BoundedQueue, control: ControlReader, health: Health, bounds: Bounds
    ) -> None:
        self._target = target
        self._queue = queue
        self._control = control
        self._health = health
        self._bounds = bounds
        self._store: Store | None = None
        self._writer: WriterId | None = None
        self._end: documents.EndDocument | None = None
        self._seq = 0
        self._waiting: list[FinishedStep] = []
        self._backlog: deque[_Encoded] = deque()
        self._backlog_bytes = 0
        self._retry_at = 0.0
        self._backoff = _FIRST_BACKOFF
        self._catalogue: tuple[tuple[TensorInfo, ...], bytes] = ((), b"")
        self._registered = target.service is None
        self._cost: Callable[[float], None] | None = None
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="watchstep-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def tell_cost(self, told: Callable[[float], None]) -> None:
        """Tell of the processor time that each turn took, in seconds."""
        self._cost = told

    def close(self, end: documents.EndDocument) -> bool:
        """Write what is left and how the worker ended; True if all of it reached the store in time."""
        self._deadline = time.monotonic() + self._bounds.close_seconds
        self._end = end
        self._closing.set()
        self._queue.wake.set()
        self._thread.join(self._bounds.close_seconds + 1.0)
        left = len(self._backlog) + len(self._waiting)
        if left:
            self._health.count("unwritten_objects", left)
        return not self._thread.is_alive() and not left

    def _run(self) -> None:
        # Now, not when the program ends: importing then would undo the exit code of an interrupt.
        import pyarrow.parquet  # noqa: F401

        started = time.monotonic()
        while not self._closing.is_set():
            self._queue.wake.wait(self._pause(time.monotonic() - started))
            self._queue.wake.clear()
            self._turn()
        while self._turn_and_ask_again():
            time.sleep(0.05)
        self._write_end()

    def _pause(self, age: float) -> float:
        """Seconds until the next flush: short in the first minute, then longer the more workers there are.

        After something urgent a stop may follow: the service is asked often for a while.
        """
        if time.monotonic() - self._queue.urgent_at < _HASTY_SECONDS:
            return min(_HASTY_PAUSE, self._bounds.flush_seconds)
        if age < _DENSE_SECONDS:
            return self._bounds.flush_seconds
        return min(_LONGEST_FLUSH, 2.0 + 0.5 * self._target.identity.world_size)

    def _turn_and_ask_again(self) -> bool:
        """One turn while closing; whether something is left that the time allows to try again."""
        self._turn()
        return bool(self._waiting or self._backlog) and time.monotonic() < self._deadline

    def _turn(self) -> None:
        began = time.thread_time()
        try:
            self._take()
            if self._ready():
                self._encode()
                self._upload()
            if self._store is not None:
                self._control.refresh(self._store)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("writer", error)
        if self._cost is not None:
            self._cost(time.thread_time() - began)

    def _attempt(self) -> str:
        return self._writer.attempt if self._writer else self._target.identity.attempt

    def _take(self) -> None:
        if self._backlog_bytes >= self._bounds.backlog_bytes:
            return  # the queue fills, and drops what is over its own bound
        items: list[Item] = self._queue.take()
        self._waiting.extend(item for item in items if isinstance(item, FinishedStep))
        for snapshot in items:
            if isinstance(snapshot, PendingSnapshot):
                key = SnapshotKey(self._attempt(), snapshot.key.worker, snapshot.key.step, snapshot.key.mode)
                self._enqueue(_Encoded(key.path, snapshot.data))

    def _ready(self) -> bool:
        """Claim the attempt first; nothing is written before that."""
        if self._writer is not None:
            return True
        if time.monotonic() < self._retry_at:
            return False
        target = self._target
        try:
            self._store = self._store or target.open_store()
            self._writer = claim_attempt(self._store, target.run, target.attempt, target.identity)
            self._control.attempt = self._writer.attempt
        except StoreError as error:
            self._failed(error)
        return self._writer is not None

    def _encode(self) -> None:
        while self._waiting and self._backlog_bytes < self._bounds.backlog_bytes:
            rows, steps = 0, []
            while self._waiting and rows < _MAX_ROWS:
                steps.append(self._waiting.pop(0))
                rows += steps[-1].rows
            self._encode_steps(steps)

    def _encode_steps(self, steps: list[FinishedStep]) -> None:
        assert self._writer is not None
        try:
            block = join([record for step in steps for record in step.records])
            if self._catalogue[0] != block.catalogue:
                self._catalogue = (block.catalogue, catalogue_bytes(block.catalogue))
            data = encode(block, self._catalogue[1])
        except Exception as error:  # noqa: BLE001 - counted; other steps may well encode
            if len(steps) > 1:
                for step in steps:
                    self._encode_steps([step])
                return
            self._health.fault("encoding", error)
            self._health.count("dropped_rows", sum(step.rows for step in steps))
            self._health.count("dropped_steps", len(steps))
            return
        key = SegmentKey(self._writer, self._seq, steps[0].step, steps[-1].step)
        self._seq += 1
        self._health.count("rows", len(block))
        self._enqueue(_Encoded(key.path, data, key))

    def _enqueue(self, encoded: _Encoded) -> None:
        self._backlog.append(encoded)
        self._backlog_bytes += len(encoded.data)

    def _upload(self) -> None:
        """Write in order; the first refusal ends the turn, so that sequence numbers never arrive out of order."""
        assert self._store is not None
        if time.monotonic() < self._retry_at:
            return
        while self._backlog:
            head = self._backlog[0]
            try:
                free = self._store.create(head.path, head.data)
            except StoreError as error:
                self._failed(error)
                return
            if not free and head.key is not None and self._store.get(head.path) != head.data:
                self._health.count("overwritten_names")
            self._backlog.popleft()
            self._backlog_bytes -= len(head.data)
            self._retry_at, self._backoff = 0.0, _FIRST_BACKOFF
            self._health.count("objects")
            self._health.count("bytes", len(head.data))
            if head.key is not None:
                self._announce(head.key)

    def _failed(self, error: StoreError) -> None:
        self._health.fault("store", error)
        self._retry_at = time.monotonic() + self._backoff
        self._backoff = min(_LONGEST_BACKOFF, 2 * self._backoff)

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

    def _write_end(self) -> None:
        if self._writer is None or self._store is None or self._end is None:
            return
        end = replace(
            self._end,
            segments=self._seq,
            writer=self._writer.writer,
            health={**self._end.health, **self._health.as_data()},
        )
        try:
            self._store.put(end_document(self._writer.attempt, end.worker), documents.encode(end))
        except StoreError as error:
            self._health.fault("store", error)
