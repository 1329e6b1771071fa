"""Alerts that the service evaluates for this run: polled while the run is mirrored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.mirror.mirrored_run import AlertChange
from watchstep.capture.service.client import ServiceClient, ServicePause
from watchstep.errors import ServiceError

_INTERVAL_SECONDS = 5.0
_FIRST_SECONDS = 1.0
_REGISTRATION_SECONDS = 10.0
"""How long the registration by the writer of segments is waited for."""

_LAST_SECONDS = 1.0
"""Time limit of the last request, while the program waits for the end of the recording."""


class ServiceAlerts:
    """The changes of a run's alerts. Used on the mirror's thread only.

    Each change is returned once, with the step and the message of the service. After a failure it pauses.

    The recorder registers its run with the first segment. If another rank of the node writes the segments, this registers the run too: it is
    idempotent, and the answer has the URL of the run's page.
    """

    def __init__(
        self,
        service: ServiceClient,
        registration: Mapping[str, object],
        attempt: Callable[[], str],
        health: RecorderHealth,
    ) -> None:
        """Create it without requests.

        Args:
            service: client of the service.
            registration: ``run`` and ``rules`` to register the run with.
            attempt: returns the claimed attempt; empty before.
            health: counts faults.
        """
        self._service = service
        self._registration = registration
        self._attempt = attempt
        self._health = health
        self._pause = ServicePause()
        self._after = 0
        self._next = time.monotonic() + _FIRST_SECONDS
        self._registers_after = self._next + _REGISTRATION_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds until the next poll."""
        return max(0.0, self._next - time.monotonic())

    def poll(self, *, is_last: bool = False) -> list[AlertChange]:
        """Return new changes, if it is time. Never raises."""
        attempt = self._attempt()
        now = time.monotonic()
        if not is_last and now < self._next:
            return []
        self._next = now + _INTERVAL_SECONDS
        if not attempt or not self._service.is_located or self._pause.is_active:
            return []
        run = str(self._registration["run"])
        try:
            if not self._service.is_registered:
                if is_last or now < self._registers_after:
                    return []
                self._service.register({**self._registration, "attempt": attempt})
            changes, self._after = self._service.alert_changes(
                run, attempt, self._after, seconds=_LAST_SECONDS if is_last else None
            )
        except ServiceError as error:
            self._health.fault("mirror alerts", error)
            self._pause.failed(error)
            return []
        self._pause.answered()
        return [change for entry in changes if (change := _parsed(entry)) is not None]


def _parsed(entry: dict[str, Any]) -> AlertChange | None:
    step, phase = entry.get("step"), entry.get("phase")
    if type(step) is not int or phase not in {"firing", "resolved"}:
        return None
    name, severity, message, url = (
        str(entry.get(key, ""))[:1000] for key in ("name", "severity", "message", "url")
    )
    return AlertChange(name, phase, severity, max(0, step), message, url)
