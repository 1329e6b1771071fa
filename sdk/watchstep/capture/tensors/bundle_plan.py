"""At which steps bundles are taken, and why."""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple

from watchstep.capture.config import Bundles
from watchstep.capture.health import RecorderHealth
from watchstep.capture.tensors.snapshots import MAX_BY_GATE

BundleReason = Literal["gate", "alert", "request", "program"]

_MAX_REQUESTED = 8
"""Bundles of one attempt on request or for alerts."""

_REQUESTED = "requested-"
"""Start of the ids of requests that a person made; the others are ids of events."""


LATE = "gate"
"""Id of a request of the gate itself, for an earlier step: its result has just arrived from a device, or no update was observed at that step."""


class BundleOccasion(NamedTuple):
    """Why a bundle is taken, and the ids of the events or requests that it fulfils."""

    reason: BundleReason
    requests: tuple[str, ...] = ()


class BundlePlan:
    """Decides at each update whether its step is bundled. Used on the training thread, except for `request`."""

    def __init__(self, config: Bundles | None, health: RecorderHealth) -> None:
        self._config = config
        self._health = health
        self._lock = threading.RLock()  # reentrant, because a signal handler may call it
        self._requests: list[str] = []
        self._requested = 0
        self._is_requested = False
        self._last_bad = -2
        self._gate_step = -1
        self._by_gate = 0
        self._missed = 0

    def request(self, name: str) -> None:
        """Request a bundle of the next complete step, for an event or a request of the control document. Thread-safe."""
        if self._config is None:
            return
        with self._lock:
            if self._requested >= _MAX_REQUESTED:
                self._health.count("dropped_bundles")
                return
            self._requested += 1
            self._requests.append(name)

    def request_next(self) -> None:
        """Request a bundle of the next complete step, by the program."""
        self._is_requested = self._config is not None

    def bad(self, step: int, *, is_late: bool = False) -> None:
        """Report a step with NaN or infinity, before its update. The first of a series is bundled, at most twice.

        Args:
            step: The step.
            is_late: Whether an earlier step may be the bad one, because the gate does not wait for a device. Then the bundle is of the next
                complete step, and does not claim to be of the failing one.
        """
        first = step not in {self._last_bad, self._last_bad + 1}
        self._last_bad = step
        if first and self._config is not None and self._config.at_gate and self._by_gate < MAX_BY_GATE:
            self._by_gate += 1
            if is_late:
                self._requests.append(LATE)
            else:
                self._gate_step = step

    @property
    def is_pending(self) -> bool:
        """Whether a bundle will be taken."""
        return bool(self._gate_step >= 0 or self._requests or self._is_requested)

    def due(self, step: int, *, is_complete: bool) -> BundleOccasion | None:
        """Return why a step is bundled, before its update; None if it is not.

        A failing step that ended without a bundle does not count. Of the first of those, the next complete step is bundled, which does not claim to
        be the failing one.

        Args:
            step: The step.
            is_complete: Whether all of its passes were observed. Only a failing step is bundled otherwise.
        """
        is_gate = step == self._gate_step
        if 0 <= self._gate_step < step:
            self._miss()
        if not is_gate and not (is_complete and (self._requests or self._is_requested)):
            return None
        with self._lock:
            requests, self._requests = tuple(self._requests), []
        self._gate_step, self._is_requested = -1, False
        if is_gate:
            return BundleOccasion("gate", requests)
        if not requests:
            return BundleOccasion("program")
        is_alert = not requests[0].startswith(_REQUESTED)
        return BundleOccasion("alert" if is_alert else "request", requests)

    def _miss(self) -> None:
        """Give up the bundle of a failing step that has ended."""
        self._gate_step = -1
        self._by_gate -= 1
        self._missed += 1
        if self._missed <= MAX_BY_GATE:
            self._requests.append(LATE)
