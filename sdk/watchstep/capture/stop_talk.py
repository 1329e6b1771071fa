"""Answering the service of a stop, and hearing soon what it makes of the answers: on a thread that runs only meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from watchstep.capture.bounded_join import join_until
from watchstep.capture.common_stop import CommonStop
from watchstep.capture.control_reader import ControlReader
from watchstep.capture.health import Health
from watchstep.control import StopRequest
from watchstep.errors import StoreError
from watchstep.stop_answers import StopAnswer
from watchstep.store import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_JOIN_SECONDS = 2.0


class StopTalk:
    """Writes answers to the store and looks for the control document there, often, until the stop is agreed on."""

    def __init__(
        self,
        stops: CommonStop,
        control: ControlReader,
        open_attempt: Callable[[str], Store],
        health: Health,
    ) -> None:
        """Nothing is said.

        Args:
            stops: what this worker makes of what it hears.
            control: where documents are heard.
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

    def hear(self, request: StopRequest, attempt: str) -> None:
        """A stop is asked for, or agreed on. Never waits."""
        answer = self._stops.hear(request)
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
            except Exception as error:  # noqa: BLE001 - what cannot be said must not end what can be heard
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
