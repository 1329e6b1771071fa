"""The store and the service as a recorder reaches them: opened when first needed, with pauses after a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from watchstep import documents
from watchstep.capture.control_reader import ControlReader
from watchstep.capture.health import Health
from watchstep.capture.identity import Identity
from watchstep.capture.service_client import RefusalError, ServiceClient
from watchstep.capture.service_pause import ServicePause
from watchstep.errors import ServiceError, StoreError
from watchstep.layout import SegmentKey
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
        open_attempt: opens it for another attempt; None where one store is for all.
    """

    store_url: str
    open_store: Callable[[], Store]
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    service: ServiceClient | None
    open_attempt: Callable[[str], Store] | None = None


class Access:
    """The way to the store and the service. On the writer's thread.

    What is announced while ``is_urgent`` says so, the service evaluates before other runs.

    Attributes:
        target: what is reached.
        store: None before it was opened.
    """

    def __init__(
        self, target: Target, control: ControlReader, health: Health, is_urgent: Callable[[], bool]
    ) -> None:
        self.target = target
        self._is_urgent = is_urgent
        self.store: Store | None = None
        self._control = control
        self._health = health
        self._retry_at = 0.0
        self._backoff = _FIRST_BACKOFF
        self._longest = _LONGEST_BACKOFF
        self._failing_since: float | None = None
        self._registered = target.service is None
        self._pause = ServicePause()

    @property
    def ready(self) -> bool:
        """Whether the pause after the last refusal is over."""
        return time.monotonic() >= self._retry_at

    @property
    def is_left_alone(self) -> bool:
        """Whether the service has refused, and is not to be asked yet."""
        return self._pause.goes_on

    @property
    def failing_for(self) -> float | None:
        """For how many seconds the store has refused; None where it does not."""
        return None if self._failing_since is None else time.monotonic() - self._failing_since

    def hurry(self) -> None:
        """The process is about to end: try at once, and often."""
        self._retry_at, self._longest = 0.0, _LONGEST_IN_HURRY
        self._pause.hurry()

    def open(self) -> Store:
        """The store.

        Raises:
            StoreError, ConfigError: it cannot be opened.
        """
        self.store = self.store or self.target.open_store()
        return self.store

    def change_to(self, attempt: str) -> Store:
        """The store, opened for the attempt that was claimed, where it was opened for another.

        Raises:
            StoreError, ConfigError: it cannot be opened.
        """
        if self.target.open_attempt is not None and attempt != self.target.identity.attempt:
            self.store = self.target.open_attempt(attempt)
        return self.open()

    def advanced(self) -> None:
        """The store has taken something."""
        self._retry_at, self._backoff = 0.0, _FIRST_BACKOFF

    def done(self) -> None:
        """The store has taken everything."""
        self._failing_since = None

    def failed(self, error: StoreError) -> None:
        """The store refused."""
        self._health.fault("store", error)
        self._failing_since = self._failing_since or time.monotonic()
        self._retry_at = time.monotonic() + min(self._longest, self._backoff)
        self._backoff = min(self._longest, 2 * self._backoff)

    def announce(self, key: SegmentKey) -> None:
        """Tell the service of a segment, if there is one; its answer goes to the control reader.

        A service that has refused is told nothing for a while: it finds the segments without.
        """
        service = self.target.service
        if service is None or self._pause.goes_on:
            return
        try:
            if not self._registered:
                run = self.target.run
                service.register({"run": run.run, "attempt": key.writer.attempt, "rules": list(run.rules)})
                self._registered = True
            name, said = self.target.identity.run, self._health.as_data()
            self._control.accept(service.announce(name, key, said, urgent=self._is_urgent()))
            self._pause.answered()
        except ServiceError as error:
            self._health.fault("service", error)
            if isinstance(error, RefusalError):
                self._pause.refused(error.status, error.after_seconds)
