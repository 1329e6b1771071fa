"""The store and the service as a recorder reaches them: opened when first needed, with pauses after a refusal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.service.announcer import Announcer
from watchstep.capture.service.client import ServiceClient
from watchstep.capture.stop.control_reader import ControlReader
from watchstep.capture.upload.claims import earlier_attempts, reuse_warning
from watchstep.errors import StoreError
from watchstep.format import documents
from watchstep.format.layout import SegmentKey
from watchstep.store.identity import StoreIdentity
from watchstep.store.store import Store

_log = logging.getLogger(__name__)

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 10.0
_LONGEST_IN_HURRY = 0.5


@dataclass(frozen=True)
class UploadTarget:
    """Where a writer writes, who records, and the service, if there is one.

    Attributes:
        store_url: of the store, for whoever uploads later what this process could not.
        open_store: opens the store, seen from the run; called on the writer's thread until it succeeds.
        store_identity: of the store, once it was opened.
        identity: who records.
        run: to make the run with.
        asked_rules: rule configs to register the run with.
        attempt: to claim the attempt with.
        service: where to announce.
        open_attempt: opens it for another attempt; None where one store is for all.
        warns_of_reuse: whether to look for earlier attempts of the run, whose steps this one hides.
    """

    store_url: str
    open_store: Callable[[], Store]
    store_identity: StoreIdentity
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    service: ServiceClient | None
    open_attempt: Callable[[str], Store] | None = None
    asked_rules: tuple[dict[str, Any], ...] = ()
    warns_of_reuse: bool = False


class Access:
    """The way to the store and the service. On the writer's thread; what is announced has a thread of its own.

    What is announced while ``is_urgent`` says so, the service evaluates before other runs.

    Attributes:
        target: what is reached.
        store: None before it was opened.
    """

    def __init__(
        self,
        target: UploadTarget,
        control: ControlReader,
        health: RecorderHealth,
        is_urgent: Callable[[], bool],
    ) -> None:
        self.target = target
        self.store: Store | None = None
        self._health = health
        self._retry_at = 0.0
        self._backoff = _FIRST_BACKOFF
        self._longest = _LONGEST_BACKOFF
        self._failing_since: float | None = None
        self._looked_for_reuse = False
        asked = {"run": target.identity.run, "rules": list(target.asked_rules)}
        self._announcer = (
            None if target.service is None else Announcer(target.service, asked, control, health, is_urgent)
        )

    @property
    def ready(self) -> bool:
        """Whether the pause after the last refusal is over."""
        return time.monotonic() >= self._retry_at

    @property
    def is_left_alone(self) -> bool:
        """Whether the service has refused, and is not to be asked yet."""
        return self._announcer is not None and self._announcer.is_left_alone

    @property
    def failing_for(self) -> float | None:
        """For how many seconds the store has refused; None where it does not."""
        return None if self._failing_since is None else time.monotonic() - self._failing_since

    def hurry(self) -> None:
        """The process is about to end: try at once, and often."""
        self._retry_at, self._longest = 0.0, _LONGEST_IN_HURRY
        if self._announcer is not None:
            self._announcer.hurry()

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

    def warn_of_reuse(self, store: Store) -> None:
        """Report once that the run has earlier attempts, if this one records its steps again.

        Raises:
            StoreError: the store could not be listed.
        """
        identity = self.target.identity
        if not self.target.warns_of_reuse or self._looked_for_reuse:
            return
        earlier = earlier_attempts(store, identity.attempt)
        self._looked_for_reuse = True
        if earlier:
            warning = reuse_warning(identity.project, identity.run, len(earlier))
            self._health.note("earlier_attempts", warning)
            _log.warning("watchstep: %s (first_step= goes on with a run; another run= begins one)", warning)

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
        """Have the service told of a segment, if there is one. Never waits: its answer goes to the control reader.

        A service that has refused, or does not answer, is told nothing for a while, and then what it has missed: of many segments
        the newest. It finds the others without.
        """
        if self._announcer is not None:
            self._announcer.announce(key)

    def finish_announcing(self, is_late: Callable[[], bool]) -> None:
        """Nothing more is announced: wait until the service knows of all segments, has failed, or it is late."""
        if self._announcer is not None:
            self._announcer.close(is_late)

    def tell_cost(self, told: Callable[[float], None]) -> None:
        """Tell of the processor time that announcing takes, in seconds."""
        if self._announcer is not None:
            self._announcer.tell_cost(told)
