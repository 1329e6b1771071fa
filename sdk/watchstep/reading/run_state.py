"""How a run stands, as far as its small documents on the store tell: the same words as the service has for it.

The service knows more: whether a job is alive, and since when nothing was heard. Where it says ``running`` or ``lost``, a store
says ``open``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from watchstep import documents
from watchstep.control import MAX_BYTES, ControlDocument
from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.layout import CONTROL_DOCUMENT, ENDS
from watchstep.process_identity import ProcessIdentity, boot_id, pid_namespace
from watchstep.reading.run_documents import ATTEMPT, END, LAUNCH, FoundDocuments, get_document, read_documents
from watchstep.store import Store

DAMAGED = "damaged"


@dataclass(frozen=True)
class StoredState:
    """How a run stands, as far as its documents tell.

    Attributes:
        state: ``created``; ``ended``: its program, which ``watchstep run`` started on this machine, is over and has recorded
            nothing; ``open``: it records, or ended without saying so; ``stopping``: it is asked to stop and no worker has ended
            yet; ``completed``, ``failed`` or ``stopped``: how its newest attempt ended; ``damaged``: a document cannot be read.
        damage: of a damaged one, which document cannot be read, and why; empty for the others.
    """

    state: str
    damage: str = ""


def read_state(store: Store) -> StoredState:
    """The state of a run.

    Args:
        store: the store as seen from the run's prefix.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        attempts = _whole(read_documents(store, ATTEMPT))
        newest = max(attempts, key=lambda read: (read.started_ns, read.attempt), default=None)
        # Ends without an attempt are of a run whose claim was lost: all that there is to go by.
        ends = _whole(read_documents(store, END, "" if newest is None else f"{ENDS}{newest.attempt}/"))
        if newest is None:
            return StoredState(_ended(ends, len(ends), asked=False) if ends else _unrecorded(store))
        return StoredState(_ended(ends, newest.world_size, asked=_asked(store, newest.attempt)))
    except FormatError as error:
        return StoredState(DAMAGED, error.what)


def _whole(found: FoundDocuments[documents.Document]) -> list[documents.Document]:
    """The documents, if all of them can be read.

    Raises:
        FormatError: one of them cannot.
    """
    for key, reason in found.damaged.items():
        raise FormatError(f"{key}: {reason}", "remove it")
    return found.documents


def _ended(ends: Sequence[documents.EndDocument], workers: int, *, asked: bool) -> str:
    """The state of an attempt.

    Args:
        ends: how its workers ended, of those that said so.
        workers: how many there are.
        asked: whether it was asked to stop. A worker that SIGTERM ends says that it failed, for it cannot know who sent it. A
            worker that fails by itself, by an exception for instance, was not stopped, whatever it was asked.
    """
    states = {end.state for end in ends}
    terminated = any(end.state == "failed" and end.reason.startswith(documents.TERMINATED) for end in ends)
    if "stopped" in states or (asked and terminated):
        return "stopped"
    if "failed" in states:
        return "failed"
    if ends and len(ends) >= workers:
        return "completed"
    return "stopping" if asked and not ends else "open"


def _unrecorded(store: Store) -> str:
    """The state of a run without a record: whether the process of its newest launch is over, where that can be seen from here."""
    launches = _whole(read_documents(store, LAUNCH))
    newest = max(launches, key=lambda read: (read.launched_ns, read.attempt), default=None)
    return "ended" if newest is not None and _is_over(newest) else "created"


def _is_over(launch: documents.LaunchDocument) -> bool:
    try:
        here = (boot_id(), pid_namespace())
    except ConfigError:
        return False  # no Linux
    if not launch.namespace or here != (launch.boot, launch.namespace):
        return False
    return not ProcessIdentity(launch.pid, launch.start_ticks, launch.boot, launch.host).is_running()


def _asked(store: Store, attempt: str) -> bool:
    try:
        control = ControlDocument.decode(get_document(store, CONTROL_DOCUMENT, MAX_BYTES))
    except NotFoundError:
        return False
    return control.stop is not None and control.stop.attempt == attempt
