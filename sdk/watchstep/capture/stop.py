"""Cooperative stops: reading the control document, and the barrier at which all workers stop together.

The control document arrives with the service's answers, or from the store.

Stop barrier: all workers stop at the same step, or none does. The service proposes a step. A worker that has not finished it
answers that it is ready, and does not pass the step from then on. A worker that has finished it answers so, and the service
proposes a later step. The step is agreed on only when all workers are ready. A worker that reaches the step earlier waits there: if
it continued, or stopped by itself, it would leave the others in a collective. Answers are sent by a thread that runs only during
this exchange.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from watchstep.capture.health import RecorderHealth
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format.control import MAX_BYTES, ControlDocument, StopAnswer, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT
from watchstep.platform.process import join_until
from watchstep.store.store import Store

TOMBSTONE = "tombstone"
"""Name of the note in health that it is unknown whether the run was stopped for good."""


class ControlReader:
    """Keeps the newest control document, and reports each newer one. Thread-safe; the store is read on the writer's thread, except by `read`.

    Until the store or the service has answered for the first time, health notes that it is unknown whether the run was stopped for good.

    Attributes:
        document: the newest document.
        relay: called with each newer document, for other ranks.
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
        self._reported_attempt = ""
        self._unverified = True
        self.document = ControlDocument()
        self.relay: Callable[[ControlDocument], None] | None = None
        health.note(TOMBSTONE, "unverified: neither the store nor the service has answered yet")

    @property
    def attempt(self) -> str:
        """The attempt that this worker claimed; empty before."""
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: str) -> None:
        with self._taking:
            self._attempt = attempt
            if self.document.version and self._reported_attempt != attempt:
                self._reported_attempt = attempt
                self._changed(self.document, attempt)

    def accept(self, document: ControlDocument) -> None:
        """Accept a document from the service, and postpone the next read from the store."""
        self._next = time.monotonic() + self._interval
        self._take(document)
        with self._taking:
            newest = self.document
            is_new = newest.version > self._relayed
            self._relayed = max(self._relayed, newest.version)
            relay = self.relay
        if is_new and relay is not None:
            relay(newest)

    def receive(self, document: ControlDocument, attempt: str) -> None:
        """Accept a document from the answer to a registration. Called on any thread.

        Args:
            document: the document.
            attempt: the registered attempt, if this worker has not claimed one yet.
        """
        self._take(document, attempt)

    def read(self, store: Store) -> None:
        """Read the store now. Called on any thread; other ranks get the document with the writer's next answer.

        Raises:
            StoreError, FormatError: there is no document, or it is invalid.
        """
        self._take(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))

    def verify(self, store: Store) -> None:
        """Read the store for the first time, before anything is uploaded."""
        if self._unverified:
            self.refresh(store)

    def verified(self) -> None:
        """Mark that the store or the service has answered: it is known whether the run was stopped for good."""
        if self._unverified:
            self._unverified = False
            self._health.withdraw(TOMBSTONE)

    def _take(self, document: ControlDocument, attempt: str = "") -> None:
        self.verified()
        with self._taking:
            if document.version > self.document.version:
                self.document = document
                self._reported_attempt = self._attempt or attempt
                self._changed(document, self._reported_attempt)

    def refresh(self, store: Store) -> None:
        """Read the store if no service has answered recently."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        try:
            self.accept(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))
        except NotFoundError:
            self.verified()
        except (StoreError, FormatError) as error:
            self._health.fault("control document", error)


BARRIER_SECONDS = 120.0
"""How long a worker waits at a step that is not agreed on: longer than the proposal takes to reach any worker, and less than collectives wait."""

Wait = Literal["wait"]


@dataclass(frozen=True)
class _PendingStop:
    request: StopRequest
    state: Literal["receiving", "ready", "passed", "agreed"]


class BarrierStop:
    """A worker's pending stop, and whether to stop now.

    Requests arrive on one thread and are checked on the training thread, without a lock: the pending stop is replaced as a whole, and
    a step is marked as finished before it is checked for a stop.
    """

    def __init__(
        self,
        worker: int,
        finished: Callable[[], int],
        *,
        takes_part: bool,
        wait_seconds: float = BARRIER_SECONDS,
    ) -> None:
        """Start without a pending stop.

        Args:
            worker: the rank.
            finished: returns the last finished step; never too small.
            takes_part: whether the program has opted in to stops.
            wait_seconds: how long to wait at a step that is not agreed on.
        """
        self._worker = worker
        self._finished = finished
        self._takes_part = takes_part
        self._wait_seconds = wait_seconds
        self._pending: _PendingStop | None = None
        self._abandoned: StopRequest | None = None
        self._changed = threading.Event()
        self.on_left: Callable[[StopAnswer], None] = lambda _: None
        """Called when the worker continues from a step at which it was ready to stop."""

    @property
    def request(self) -> StopRequest | None:
        """The last pending request."""
        return None if self._pending is None else self._pending.request

    def receive(self, request: StopRequest) -> StopAnswer | None:
        """Receive a request to stop, or an agreed stop. Returns the answer, if one is due. Not called on the training thread."""
        if self._pending is not None and self._pending.request == request:
            return None
        if request.agreed:
            self._pending = _PendingStop(request, "agreed")
            self._changed.set()
            return None
        if not self._takes_part:
            return self._answer(request, "refuses")
        # The order matters: from here on, a thread that finishes the step waits for the state set below.
        self._pending = _PendingStop(request, "receiving")
        state: Literal["ready", "passed"] = "ready" if self._finished() < request.step else "passed"
        self._pending = _PendingStop(request, state)
        self._changed.set()
        return self._answer(request, state)

    def check(self, step: int) -> StopRequest | Wait | None:
        """Return the request if the training stops after a finished step, "wait" if it is not decided yet, or None to continue."""
        pending = self._pending
        if pending is None or step < pending.request.step or pending.state == "passed":
            return None
        if pending.state == "agreed":
            return pending.request
        waits = step == pending.request.step and self._abandoned != pending.request
        return "wait" if waits else None

    def due(self, step: int) -> StopRequest | None:
        """Return the stop that is due after a finished step. Called on the training thread; waits for an undecided request."""
        if self._pending is None:
            return None
        deadline = time.monotonic() + self._wait_seconds
        while True:
            self._changed.clear()
            request = self.check(step)
            if request != "wait":
                return request
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                self.stop_waiting()

    def stop_waiting(self) -> None:
        """Stop waiting at the proposed step: continue, and answer so. Thread-safe; does nothing if there is nothing to wait for."""
        pending = self._pending
        if pending is None or pending.state in {"agreed", "passed"} or self._abandoned == pending.request:
            return
        self._abandoned = pending.request
        self._changed.set()
        self.on_left(self._answer(pending.request, "left"))

    def _answer(
        self, request: StopRequest, state: Literal["ready", "passed", "left", "refuses"]
    ) -> StopAnswer:
        return StopAnswer(self._worker, request.step, state, max(0, self._finished()))


_FIRST_PAUSE, _MAX_PAUSE = 0.1, 2.0
_JOIN_SECONDS = 2.0


class StopExchange:
    """Writes answers to the store and polls the control document there until the stop is agreed on."""

    def __init__(
        self,
        stops: BarrierStop,
        control: ControlReader,
        open_attempt: Callable[[str], Store],
        health: RecorderHealth,
    ) -> None:
        """Start without answers.

        Args:
            stops: the worker's pending stop.
            control: receives control documents.
            open_attempt: opens the run's store for an attempt.
            health: counts faults.
        """
        self._stops = stops
        self._control = control
        self._open_attempt = open_attempt
        self._health = health
        stops.on_left = self._on_left
        self._answers: queue.SimpleQueue[tuple[str, StopAnswer]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.RLock()  # reentrant, because a signal handler may close the hook
        self._thread: threading.Thread | None = None

    def receive(self, request: StopRequest, attempt: str) -> None:
        """Receive a request to stop, or an agreed stop. Never blocks."""
        answer = self._stops.receive(request)
        if answer is not None:
            self._send(attempt, answer)

    def _on_left(self, answer: StopAnswer) -> None:
        self._health.note(
            "stop", f"the ranks did not agree to stop at step {answer.requested_step}: training continued"
        )
        self._send(self._control.attempt, answer)

    def _send(self, attempt: str, answer: StopAnswer) -> None:
        self._answers.put((attempt, answer))
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._exchange, name="watchstep-stop", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the exchange. Does not block."""
        self._closing = True
        self._wake.set()

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait for pending answers, until ``is_late`` returns True."""
        join_until(self._thread, is_late, _JOIN_SECONDS)

    def _exchange(self) -> None:
        pause = _FIRST_PAUSE
        unsent: tuple[str, StopAnswer] | None = None
        store: Store | None = None
        while not self._closing:
            self._wake.clear()
            try:
                while unsent is not None or not self._answers.empty():
                    unsent = unsent or self._answers.get()
                    store = store or self._open_attempt(unsent[0])
                    store.create(unsent[1].key(unsent[0]), unsent[1].encode())
                    unsent, pause = None, _FIRST_PAUSE
                if store is not None:
                    self._control.read(store)
            except StoreError as error:
                self._health.fault("stop", error)
            except Exception as error:  # noqa: BLE001 - a failed answer must not end the reading of documents
                self._health.fault("stop", error)
                unsent = None
            with self._lock:
                if self._settled and self._answers.empty() and unsent is None:
                    self._thread = None
                    return
            self._wake.wait(pause)
            pause = min(_MAX_PAUSE, 1.5 * pause)

    @property
    def _settled(self) -> bool:
        request = self._stops.request
        return request is None or request.agreed
