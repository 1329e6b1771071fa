"""Cooperative stops: the worker's view of the control document, and the barrier at which all workers stop together.

The worker's view of its control document: from the service's answers, or from the store.

The stop barrier: all workers stop at the same step, or none does.

The service proposes a step. A worker that has not finished it answers that it is ready, and does not pass it from then
on; a worker that has finished it says so, and the service proposes a later step. When all workers are ready, and only
then, the step is agreed on. A worker that reaches the step before that waits there: if it went on, or stopped by itself,
it would leave the others in a collective. Answers are sent by a thread that runs only during this exchange.
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
"""The note in health that nobody knows yet whether the run was stopped for good."""


class ControlReader:
    """Keeps the newest document seen, and tells of each newer one. Thread-safe; the store is asked on the writer's thread, but by `look`.

    Until the store or the service has answered for the first time, health says that nobody knows whether the run was stopped for good.

    Attributes:
        document: the newest document.
        relay: told of each newer document, for other ranks.
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
        self._heard_as = ""
        self._unverified = True
        self.document = ControlDocument()
        self.relay: Callable[[ControlDocument], None] | None = None
        health.note(TOMBSTONE, "unverified: neither the store nor the service has answered yet")

    @property
    def attempt(self) -> str:
        """The attempt that this worker claimed; empty before that."""
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: str) -> None:
        with self._taking:
            self._attempt = attempt
            if self.document.version and self._heard_as != attempt:
                self._heard_as = attempt
                self._changed(self.document, attempt)

    def accept(self, document: ControlDocument) -> None:
        """A document from the service; also puts off the next look at the store."""
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
        """A document from the service, in the answer to a registration. On any thread.

        Args:
            document: the document.
            attempt: the attempt that was registered, where this worker has claimed none yet.
        """
        self._take(document, attempt)

    def look(self, store: Store) -> None:
        """Look at the store now. On any thread; other ranks are told of what is found when the writer's next hears of it.

        Raises:
            StoreError, FormatError: there is no document, or it cannot be read.
        """
        self._take(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))

    def verify(self, store: Store) -> None:
        """Look at the store for the first time, before anything is uploaded."""
        if self._unverified:
            self.refresh(store)

    def verified(self) -> None:
        """The store or the service has answered: whether the run was stopped for good is known."""
        if self._unverified:
            self._unverified = False
            self._health.withdraw(TOMBSTONE)

    def _take(self, document: ControlDocument, attempt: str = "") -> None:
        self.verified()
        with self._taking:
            if document.version > self.document.version:
                self.document = document
                self._heard_as = self._attempt or attempt
                self._changed(document, self._heard_as)

    def refresh(self, store: Store) -> None:
        """Look at the store, if no service has answered for a while."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        try:
            self.accept(ControlDocument.decode(store.get(CONTROL_DOCUMENT, limit=MAX_BYTES)))
        except NotFoundError:
            self.verified()
        except (StoreError, FormatError) as error:
            self._health.fault("control document", error)


PATIENCE_SECONDS = 120.0
"""How long a worker waits at a step that is not agreed on: longer than any other takes to hear of it, and less than collectives wait."""

Wait = Literal["wait"]


@dataclass(frozen=True)
class _PendingStop:
    request: StopRequest
    state: Literal["hearing", "ready", "passed", "agreed"]


class CommonStop:
    """What a worker has pending of a stop, and whether it is to stop now.

    Heard on one thread, asked of on the training thread, without a lock between them: what was pending is replaced as a whole, and a
    step is marked as finished before it is looked whether to stop there.
    """

    def __init__(
        self,
        worker: int,
        finished: Callable[[], int],
        *,
        takes_part: bool,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Nothing was pending.

        Args:
            worker: the rank.
            finished: the last step that is finished; never too small.
            takes_part: whether the program has agreed to be stopped.
            patience: seconds to wait at a step that is not agreed on.
        """
        self._worker = worker
        self._finished = finished
        self._takes_part = takes_part
        self._patience = patience
        self._pending: _PendingStop | None = None
        self._left: StopRequest | None = None
        self._changed = threading.Event()
        self.left: Callable[[StopAnswer], None] = lambda _: None
        """Told when the worker goes on from a step at which it was ready to stop."""

    @property
    def request(self) -> StopRequest | None:
        """What was pending last."""
        return None if self._pending is None else self._pending.request

    def receive(self, request: StopRequest) -> StopAnswer | None:
        """A stop is asked for, or agreed on; the answer, where one is due. Not on the training thread."""
        if self._pending is not None and self._pending.request == request:
            return None
        if request.agreed:
            self._pending = _PendingStop(request, "agreed")
            self._changed.set()
            return None
        if not self._takes_part:
            return self._answer(request, "refuses")
        # In this order: from here on whoever finishes the step waits for what is found next.
        self._pending = _PendingStop(request, "hearing")
        state: Literal["ready", "passed"] = "ready" if self._finished() < request.step else "passed"
        self._pending = _PendingStop(request, state)
        self._changed.set()
        return self._answer(request, state)

    def look(self, step: int) -> StopRequest | Wait | None:
        """Whether to stop after a step that is finished: the request, or None to go on, or that it is to be waited for."""
        pending = self._pending
        if pending is None or step < pending.request.step or pending.state == "passed":
            return None
        if pending.state == "agreed":
            return pending.request
        waits = step == pending.request.step and self._left != pending.request
        return "wait" if waits else None

    def due(self, step: int) -> StopRequest | None:
        """The stop that is due after a step that is finished. On the training thread; where one is asked for it may wait."""
        if self._pending is None:
            return None
        deadline = time.monotonic() + self._patience
        while True:
            self._changed.clear()
            request = self.look(step)
            if request != "wait":
                return request
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                self.leave()

    def leave(self) -> None:
        """Wait no more at the step that is asked for now: go on, and say so. Any thread; nothing where it is not waited for."""
        pending = self._pending
        if pending is None or pending.state in {"agreed", "passed"} or self._left == pending.request:
            return
        self._left = pending.request
        self._changed.set()
        self.left(self._answer(pending.request, "left"))

    def _answer(
        self, request: StopRequest, state: Literal["ready", "passed", "left", "refuses"]
    ) -> StopAnswer:
        return StopAnswer(self._worker, request.step, state, max(0, self._finished()))


_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_JOIN_SECONDS = 2.0


class StopTalk:
    """Writes answers to the store and looks for the control document there, often, until the stop is agreed on."""

    def __init__(
        self,
        stops: CommonStop,
        control: ControlReader,
        open_attempt: Callable[[str], Store],
        health: RecorderHealth,
    ) -> None:
        """Nothing is said.

        Args:
            stops: what this worker makes of what it hears.
            control: where documents are pending.
            open_attempt: opens the store for an attempt, seen from the run.
            health: for faults.
        """
        self._stops = stops
        self._control = control
        self._open_attempt = open_attempt
        self._health = health
        stops.left = self._left
        self._answers: queue.SimpleQueue[tuple[str, StopAnswer]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.RLock()  # a signal's handler may close the hook
        self._thread: threading.Thread | None = None

    def receive(self, request: StopRequest, attempt: str) -> None:
        """A stop is asked for, or agreed on. Never waits."""
        answer = self._stops.receive(request)
        if answer is not None:
            self._say(attempt, answer)

    def _left(self, answer: StopAnswer) -> None:
        self._health.note(
            "stop", f"the ranks have not agreed to stop at step {answer.asked}: training went on"
        )
        self._say(self._control.attempt, answer)

    def _say(self, attempt: str, answer: StopAnswer) -> None:
        self._answers.put((attempt, answer))
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._talk, name="watchstep-stop", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Say and hear no more. Waits for nothing."""
        self._closing = True
        self._wake.set()

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait for what is being said, until it is late."""
        join_until(self._thread, is_late, _JOIN_SECONDS)

    def _talk(self) -> None:
        pause = _FIRST_PAUSE
        unsaid: tuple[str, StopAnswer] | None = None
        store: Store | None = None
        while not self._closing:
            self._wake.clear()
            try:
                while unsaid is not None or not self._answers.empty():
                    unsaid = unsaid or self._answers.get()
                    store = store or self._open_attempt(unsaid[0])
                    store.create(unsaid[1].key(unsaid[0]), unsaid[1].encode())
                    unsaid, pause = None, _FIRST_PAUSE
                if store is not None:
                    self._control.look(store)
            except StoreError as error:
                self._health.fault("stop", error)
            except Exception as error:  # noqa: BLE001 - what cannot be said must not end what can be pending
                self._health.fault("stop", error)
                unsaid = None
            with self._lock:
                if self._settled and self._answers.empty() and unsaid is None:
                    self._thread = None
                    return
            self._wake.wait(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    @property
    def _settled(self) -> bool:
        request = self._stops.request
        return request is None or request.agreed
