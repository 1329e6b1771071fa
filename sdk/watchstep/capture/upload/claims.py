"""Claims on the store: the run, the attempt and the writer's name, each by creating an object only if absent."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath as Path

from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import ATTEMPTS, RUN_DOCUMENT, WriterId, attempt_document
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
        held = store if others is None or number == 1 else others(name)
        if held.create(key, data) or _is_ours(held, key, data):
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
