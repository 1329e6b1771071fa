"""Telling the service of segments, on a thread of its own: neither writing nor training waits for an answer.

One request names one segment. The answers hold the control document, which is heard here first. What the service is not told of it finds
by listing the store, for the number of a later segment shows the gap: while it is slow, the newest is enough.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.client import ServiceClient, ServicePause
from watchstep.capture.stop.control_reader import ControlReader
from watchstep.errors import ServiceError
from watchstep.format.layout import SegmentKey
from watchstep.platform.bounded_join import join_until
from watchstep.platform.transport import ServiceRefusedError, UnreachableError

_MOST_WAITING = 64
_SLOW_SECONDS = 1.0
"""After an answer that took so long, of the segments that wait only the newest is announced."""
_LOCATING_SECONDS = 1.0


class Announcer:
    """Announces segments in order, with pauses after failures. Thread-safe; the thread starts with the first segment."""

    def __init__(
        self,
        service: ServiceClient,
        registration: Mapping[str, object],
        control: ControlReader,
        health: RecorderHealth,
        is_urgent: Callable[[], bool],
    ) -> None:
        """Nothing is announced yet.

        Args:
            service: where to announce.
            registration: ``run`` and ``rules`` to register the run with, once and before anything else.
            control: told of the document in each answer.
            health: for faults; told to the service with each segment.
            is_urgent: whether the service shall evaluate before other runs.
        """
        self._service = service
        self._registration = registration
        self._control = control
        self._health = health
        self._is_urgent = is_urgent
        self._registered = False
        self._pause = ServicePause()
        self._waiting: deque[SegmentKey] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._cost: Callable[[float], None] | None = None

    @property
    def is_left_alone(self) -> bool:
        """Whether the service has refused, and is not to be asked yet."""
        return self._pause.goes_on

    def tell_cost(self, told: Callable[[float], None]) -> None:
        """Tell of the processor time of each request, in seconds."""
        self._cost = told

    def announce(self, key: SegmentKey) -> None:
        """Have the service told of a segment. Never waits; of too many the oldest are left out."""
        with self._changed:
            self._waiting.append(key)
            self._skip(_MOST_WAITING)
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="watchstep-announcer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hurry(self) -> None:
        """The process is about to end: ask once more at once."""
        with self._changed:
            self._pause.hurry()
            self._changed.notify_all()

    def close(self, is_late: Callable[[], bool]) -> None:
        """Announce what waits, and end where the service refuses or does not answer; wait for that until it is late."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join_until(self._thread, is_late)

    def _work(self) -> None:
        while (key := self._next()) is not None:
            began, cpu = time.monotonic(), time.thread_time()
            done = self._told(key)
            with self._changed:
                if done and self._waiting and self._waiting[0] == key:
                    self._waiting.popleft()
                if time.monotonic() - began >= _SLOW_SECONDS:
                    self._skip(1)
            if self._cost is not None:
                self._cost(time.thread_time() - cpu)

    def _next(self) -> SegmentKey | None:
        """Wait for a segment that can be announced now; None where it is time to end."""
        with self._changed:
            while not (self._waiting and self._service.is_located and not self._pause.goes_on):
                if self._closing:
                    return None
                pause = self._pause.left or _LOCATING_SECONDS
                self._changed.wait(pause if self._waiting else None)
            return self._waiting[0]

    def _skip(self, kept: int) -> None:
        while len(self._waiting) > kept:
            self._waiting.popleft()
            self._health.count("skipped_announcements")

    def _told(self, key: SegmentKey) -> bool:
        """Whether the service needs to hear of a segment no more: it was told, or would refuse it again."""
        try:
            self._tell(key)
        except ServiceError as error:
            self._health.fault("service", error)
            self._pause.failed(error)
            return isinstance(error, ServiceRefusedError) and error.is_final and self._registered
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("service", error)
            self._pause.failed(UnreachableError(str(error), ""))
            return False
        return True

    def _tell(self, key: SegmentKey) -> None:
        if not self._registered:
            self._service.register({**self._registration, "attempt": key.writer.attempt})
            self._registered = True
        run = str(self._registration["run"])
        control = self._service.announce(run, key, self._health.as_data(), urgent=self._is_urgent())
        self._pause.answered()
        self._health.unexpect("service")
        self._control.accept(control)
