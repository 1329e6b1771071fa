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

_MAX_ATTEMPTS = 1000


def claim_attempt(
    store: Store,
    run: documents.RunDocument,
    attempt: documents.AttemptDocument,
    identity: Identity,
    *,
    late: bool = False,
    others: Callable[[str], Store] | None = None,
) -> WriterId:
    """Create the run if it is new, and claim or join the attempt.

    All ranks of an attempt share its id, and join it. If an earlier process of the same rank has already written, the rank gets
    a writer name of its own. A lone worker that finds the id taken was restarted by the same launcher: it claims the next free
    one, ``<id>.2`` and so on. A claim with a lost answer is recognized, because the document contains who claimed, and when, to
    the nanosecond.

    Args:
        store: the run's store.
        run: document to write if the run is new.
        attempt: document to write if the attempt is new.
        identity: identity of this worker.
        late: for a process that has ended: the document states it, and a rank never takes a name that a live one may be about to take.
        others: opens the store for another attempt, if credentials are limited to one attempt.

    Returns:
        The id of this worker's writer.

    Raises:
        StoreError: the store refuses, or a thousand attempts exist.
    """
    store.create(RUN_DOCUMENT, documents.encode(run))
    if identity.world_size > 1:
        store.create(attempt_document(identity.attempt), documents.encode(replace(attempt, late=late)))
        writer = identity.writer()
        taken = late or any(store.entries(writer.prefix))
        return identity.writer(f"-{secrets.token_hex(3)}") if taken else writer
    for number in range(1, _MAX_ATTEMPTS):
        name = identity.attempt if number == 1 else f"{identity.attempt}.{number}"
        key, document = attempt_document(name), replace(attempt, attempt=name)
        attempt_store = store if others is None or number == 1 else others(name)
        if attempt_store.create(key, documents.encode(replace(document, late=late))):
            return replace(identity, attempt=name).writer()
        if _is_ours(attempt_store, key, document):
            return replace(identity, attempt=name).writer()
    raise StoreError(f"run {run.run} has {_MAX_ATTEMPTS} attempts", "record under a new run id")


def restore_documents(
    store: Store,
    run: documents.RunDocument,
    attempt: documents.AttemptDocument,
    name: str,
    health: RecorderHealth,
) -> None:
    """Write the documents of a run and an attempt again if a local store was emptied during the recording.

    Without them, nothing recorded from then on could be read. Earlier data is lost, and readers see the gap. Buckets
    are not checked, because that would cost a request for each segment.

    Args:
        store: the run's store.
        run: the run's document, as written.
        attempt: the attempt's document.
        name: name of the claimed attempt.
        health: counts the loss, once.

    Raises:
        StoreError: the store refuses, or was replaced.
    """
    if not store.is_local:
        return
    try:
        store.size(RUN_DOCUMENT)
    except NotFoundError:
        lost = StoreError(
            f"run {store.location}: its document was removed during the recording, most likely with its earlier data",
            "the document is written again; do not change the folder while the program runs",
        )
        health.fault("emptied run", lost)
        store.create(RUN_DOCUMENT, documents.encode(run))
        store.create(attempt_document(name), documents.encode(replace(attempt, attempt=name)))


def earlier_attempts(store: Store, attempt: str) -> list[str]:
    """Return the attempts of a run, except one and its restarts, which are named ``<attempt>.2`` or ``<attempt>-r1``.

    Args:
        store: the run's store.
        attempt: the attempt's id from its launcher.

    Raises:
        StoreError: the store could not be listed.
    """
    names = (Path(entry.key).stem for entry in store.entries(ATTEMPTS))
    restart = re.compile(rf"{re.escape(attempt)}([.]\d+|-r\d+([.]\d+)?)?")
    return sorted(name for name in names if not restart.fullmatch(name))


def reuse_warning(project: str, run: str, attempts: int) -> str:
    """Return the warning for a program that records a run again from its first step."""
    count = "an earlier attempt" if attempts == 1 else f"{attempts} earlier attempts"
    return (
        f"run {project}/{run} has {count}: readers show the newest attempt of each step, so the steps recorded now"
        " hide the earlier ones"
    )


def _is_ours(store: Store, key: str, document: documents.AttemptDocument) -> bool:
    """Whether the process, or an interrupted ``watchstep sync``, wrote the document."""
    ours = [documents.encode(replace(document, late=late)) for late in (False, True)]
    try:
        return store.get(key, limit=documents.MAX_BYTES) in ours
    except FormatError:  # too large to be a claim
        return False


def claim_node(
    store: Store, run: documents.RunDocument, attempt: documents.AttemptDocument, identity: Identity
) -> WriterId | None:
    """Create the run and the attempt if they are new, for all ranks of a node, and choose the name of its writer.

    Ranks in separate containers may share a node name without meeting, so the writer's name is random.

    Returns:
        The writer id; None if the store lets an object be created twice (some S3-compatible services ignore
        ``If-None-Match``), because ranks could then write the same data twice.

    Raises:
        StoreError: the store refuses.
    """
    store.create(RUN_DOCUMENT, documents.encode(run))
    key, data = attempt_document(identity.attempt), documents.encode(attempt)
    if store.create(key, data) and store.create(key, data):
        return None
    return WriterId(identity.attempt, identity.node, f"node-{secrets.token_hex(4)}")


_log = logging.getLogger(__name__)

_FIRST_BACKOFF = 0.2
_MAX_BACKOFF = 10.0
_MAX_BACKOFF_AT_END = 0.5


@dataclass(frozen=True)
class UploadTarget:
    """Where a writer writes, its identity, and the service, if there is one.

    Attributes:
        store_url: URL of the store, for a later upload of what this process could not upload.
        open_store: opens the run's store; called on the writer's thread until it succeeds.
        store_identity: identity of the store, once it was opened.
        identity: identity of the recorder.
        run: the run's document.
        requested_rules: rule configs to register the run with.
        attempt: the attempt's document.
        service: service for announcements.
        open_attempt: opens the store for another attempt; None if one store serves all.
        warns_of_reuse: whether to check for earlier attempts of the run with the same steps.
    """

    store_url: str
    open_store: Callable[[], Store]
    store_identity: StoreIdentity
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    service: ServiceClient | None
    open_attempt: Callable[[str], Store] | None = None
    requested_rules: tuple[dict[str, Any], ...] = ()
    warns_of_reuse: bool = False


class Access:
    """Access to the store and the service. Used on the writer's thread; announcements have a separate thread.

    Segments announced while ``is_urgent`` returns True are evaluated before other runs.

    Attributes:
        target: the upload target.
        store: the store; None before it was opened.
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
        self._longest = _MAX_BACKOFF
        self._failing_since: float | None = None
        self._checked_reuse = False
        registration = {
            "run": target.identity.run,
            "rules": list(target.requested_rules),
            "store": target.store_url,
        }
        self._announcer = (
            None
            if target.service is None
            else Announcer(target.service, registration, control, health, is_urgent)
        )

    @property
    def ready(self) -> bool:
        """Whether the pause after the last refusal is over."""
        return time.monotonic() >= self._retry_at

    @property
    def is_service_paused(self) -> bool:
        """Whether the service has refused, and must not be contacted yet."""
        return self._announcer is not None and self._announcer.is_paused

    @property
    def failing_for(self) -> float | None:
        """Seconds since the store started to refuse; None if it does not."""
        return None if self._failing_since is None else time.monotonic() - self._failing_since

    def hurry(self) -> None:
        """Retry at once and often, because the process is about to end."""
        self._retry_at, self._longest = 0.0, _MAX_BACKOFF_AT_END
        if self._announcer is not None:
            self._announcer.hurry()

    def open(self) -> Store:
        """Open the store, or return the open one.

        Raises:
            StoreError, ConfigError: it cannot be opened.
        """
        self.store = self.store or self.target.open_store()
        return self.store

    def change_to(self, attempt: str) -> Store:
        """Reopen the store for the claimed attempt, if it was opened for another.

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
        if not self.target.warns_of_reuse or self._checked_reuse:
            return
        earlier = earlier_attempts(store, identity.attempt)
        self._checked_reuse = True
        if earlier:
            warning = reuse_warning(identity.project, identity.run, len(earlier))
            self._health.note("earlier_attempts", warning)
            _log.warning(
                "watchstep: %s (first_step= continues a run; another run= starts a new one)", warning
            )

    def advanced(self) -> None:
        """Report progress: the store has accepted an object."""
        self._retry_at, self._backoff = 0.0, _FIRST_BACKOFF

    def done(self) -> None:
        """Report completion: the store has accepted everything."""
        self._failing_since = None

    def failed(self, error: StoreError) -> None:
        """Report a refusal of the store."""
        self._health.fault("store", error)
        self._failing_since = self._failing_since or time.monotonic()
        self._retry_at = time.monotonic() + min(self._longest, self._backoff)
        self._backoff = min(self._longest, 2 * self._backoff)

    def announce(self, key: SegmentKey) -> None:
        """Announce a segment to the service, if there is one. Never blocks: the answer goes to the control reader.

        A service that has refused, or does not answer, gets no announcements for a while, and then the newest of
        the skipped ones. It discovers the others by itself.
        """
        if self._announcer is not None:
            self._announcer.announce(key)

    def finish_announcing(self, is_late: Callable[[], bool]) -> None:
        """End announcements: wait until the service knows all segments, has failed, or ``is_late`` returns True."""
        if self._announcer is not None:
            self._announcer.close(is_late)

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Set a callback for the processor seconds of announcements."""
        if self._announcer is not None:
            self._announcer.report_cost(report)
