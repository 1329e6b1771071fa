"""The store and the service as a recorder reaches them, and its claims: the run, the attempt and the writer's name.

A claim creates an object only if it is absent. The store is opened on first use, with pauses after a refusal.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath as Path
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.service.client import ServiceClient
from watchstep.capture.service.registration import Announcer
from watchstep.capture.stop import ControlReader
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import ATTEMPTS, RUN_DOCUMENT, SegmentKey, WriterId, attempt_document
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store

_MOST_ATTEMPTS = 1000


def claim_attempt(
    store: Store,
    run: documents.RunDocument,
    attempt: documents.AttemptDocument,
    identity: Identity,
    *,
    late: bool = False,
    others: Callable[[str], Store] | None = None,
) -> WriterId:
    """Make the run if it is new, and claim or join the attempt.

    All ranks of an attempt share its id, and join it; one whose place has been written to, by an earlier process of
    the same rank, takes a writer's name of its own. A lone worker that finds the id taken was started again under the
    same launcher: it claims the next free one, ``<id>.2`` and so on. A claim whose answer was lost is found again: the
    document says who claimed, and when, to the nanosecond.

    Args:
        store: seen from the run.
        run: written if the run is new.
        attempt: written if the attempt is.
        identity: who claims.
        late: for a process that has ended; a rank then never takes the name that a live one may be about to take.
        others: opens the store for another attempt, where its credentials are for one.

    Returns:
        The writer that this worker is.

    Raises:
        StoreError: the store refused, or a thousand attempts are taken.
    """
    store.create(RUN_DOCUMENT, documents.encode(run))
    if identity.world_size > 1:
        store.create(attempt_document(identity.attempt), documents.encode(attempt))
        writer = identity.writer()
        taken = late or any(store.entries(writer.prefix))
        return identity.writer(f"-{secrets.token_hex(3)}") if taken else writer
    for number in range(1, _MOST_ATTEMPTS):
        name = identity.attempt if number == 1 else f"{identity.attempt}.{number}"
        key, data = attempt_document(name), documents.encode(replace(attempt, attempt=name))
        attempt_store = store if others is None or number == 1 else others(name)
        if attempt_store.create(key, data) or _is_ours(attempt_store, key, data):
            return replace(identity, attempt=name).writer()
    raise StoreError(f"run {run.run}: {_MOST_ATTEMPTS} attempts are taken", "record under a new run id")


def restore_documents(
    store: Store,
    run: documents.RunDocument,
    attempt: documents.AttemptDocument,
    name: str,
    health: RecorderHealth,
) -> None:
    """Write the documents of a run and an attempt anew where somebody has emptied a local store that is recorded to.

    Without them nothing that is recorded from then on could be read. What was written before is gone, and readers see the gap. In a bucket
    nothing is looked for: it would cost a request for each segment.

    Args:
        store: seen from the run.
        run: the run's document, as it was written.
        attempt: the attempt's.
        name: of the attempt that was claimed.
        health: where it is told, once.

    Raises:
        StoreError: the store refused, or is another one.
    """
    if not store.is_local:
        return
    try:
        store.size(RUN_DOCUMENT)
    except NotFoundError:
        lost = StoreError(
            f"run {store.location}: its document was removed while it is recorded, and what was written before, too, most likely",
            "the document is written anew; leave the folder alone while the program runs",
        )
        health.fault("emptied run", lost)
        store.create(RUN_DOCUMENT, documents.encode(run))
        store.create(attempt_document(name), documents.encode(replace(attempt, attempt=name)))


def earlier_attempts(store: Store, attempt: str) -> list[str]:
    """Attempts of a run besides one and its restarts, which are named ``<attempt>.2`` or ``<attempt>-r1``.

    Args:
        store: seen from the run.
        attempt: as its launcher drew it.

    Raises:
        StoreError: the store could not be listed.
    """
    names = (Path(entry.key).stem for entry in store.entries(ATTEMPTS))
    restart = re.compile(rf"{re.escape(attempt)}([.]\d+|-r\d+([.]\d+)?)?")
    return sorted(name for name in names if not restart.fullmatch(name))


def reuse_warning(project: str, run: str, attempts: int) -> str:
    """What a program is told that records a run again from its first step."""
    count = "an earlier attempt" if attempts == 1 else f"{attempts} earlier attempts"
    return (
        f"run {project}/{run} has {count}: readers show the newest attempt of each step, so the steps that are recorded now"
        " hide the earlier ones"
    )


def _is_ours(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.get(key, limit=documents.MAX_BYTES) == data
    except FormatError:  # too large to be a claim
        return False


def claim_node(
    store: Store, run: documents.RunDocument, attempt: documents.AttemptDocument, identity: Identity
) -> WriterId | None:
    """Make the run and the attempt where they are new, for all ranks of a node, and draw the name of its writer.

    Ranks in containers of their own may have one node's name and meet apart, so no two writers are ever named alike.

    Returns:
        The writer; None where the store does not keep a name for the first that creates it (some services that speak S3
        ignore ``If-None-Match``): what ranks hand over to each other could then be there twice.

    Raises:
        StoreError: the store refused.
    """
    store.create(RUN_DOCUMENT, documents.encode(run))
    key, data = attempt_document(identity.attempt), documents.encode(attempt)
    if store.create(key, data) and store.create(key, data):
        return None
    return WriterId(identity.attempt, identity.node, f"node-{secrets.token_hex(4)}")


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

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Tell of the processor time that announcing takes, in seconds."""
        if self._announcer is not None:
            self._announcer.report_cost(report)
