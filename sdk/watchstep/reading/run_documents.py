"""The documents of a run and its journal, the run's state as far as the store determines it, and the runs that a store has.

Whoever may write to a store can put anything into a run: pipes, large objects, or millions of small ones. Reading one
kind of document is bounded, and what exceeds the bound counts as damaged; a damaged document affects no other.

The service knows more than the store: whether a job is alive, and when it was last heard of. Where the service says
``running`` or ``lost``, a store says ``open``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from watchstep.errors import (
    BadNameError,
    ConfigError,
    FormatError,
    MissingStoreError,
    NotFoundError,
    StoreError,
)
from watchstep.format import documents, journal
from watchstep.format.control import MAX_BYTES, ControlDocument
from watchstep.format.documents import Document
from watchstep.format.journal import JournalEvaluation
from watchstep.format.layout import (
    ATTEMPTS,
    CONTROL_DOCUMENT,
    ENDS,
    LAUNCHES,
    RUN_DOCUMENT,
    attempt_document,
    journal_part,
    journal_prefix,
    launch_document,
)
from watchstep.platform.process import ProcessIdentity, boot_id, pid_namespace
from watchstep.platform.terminal_text import printable
from watchstep.store.store import Store

_MIB = 1024 * 1024
_BYTES_OF_ENTRY = 512
"""What each object of a listing counts for, besides its size: listing and opening it takes time, too."""


@dataclass(frozen=True)
class DocumentKind(Generic[Document]):
    """A kind of document, and how much of it is read.

    Attributes:
        kind: what it is decoded as.
        prefix: where it lies, relative to the run.
        max_bytes: the largest document that is read.
        total_bytes: how much of the documents of one prefix is read.
        key: the key that a document belongs under; None where it has several.
    """

    kind: type[Document]
    prefix: str
    max_bytes: int
    total_bytes: int
    key: Callable[[Document], str] | None = None


ATTEMPT = DocumentKind(
    documents.AttemptDocument, ATTEMPTS, 65536, 8 * _MIB, lambda read: attempt_document(read.attempt)
)
"""One has 200 bytes: 11,000 attempts are read."""

LAUNCH = DocumentKind(
    documents.LaunchDocument, LAUNCHES, 65536, 8 * _MIB, lambda read: launch_document(read.attempt)
)

END = DocumentKind(documents.EndDocument, ENDS, documents.MAX_BYTES, 128 * _MIB)
"""One has some kilobytes: those of 16,384 ranks are read."""


@dataclass
class FoundDocuments(Generic[Document]):
    """Documents below a prefix, and what is wrong with the others.

    Attributes:
        documents: those that can be read, in the order of the listing.
        damaged: key → why it cannot be read; a prefix for documents beyond what is read.
    """

    documents: list[Document] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


def read_documents(store: Store, kind: DocumentKind[Document], prefix: str = "") -> FoundDocuments[Document]:
    """The documents of one kind.

    Args:
        store: the store as seen from the run's prefix.
        kind: which.
        prefix: only those below it; all of them where it is empty.

    Raises:
        StoreError: the store cannot be read.
    """
    documents_found: FoundDocuments[Document] = FoundDocuments()
    left = kind.total_bytes
    for entry in store.entries(prefix or kind.prefix):
        left -= _BYTES_OF_ENTRY + (entry.size if entry.size <= kind.max_bytes else 0)
        if left < 0:
            documents_found.damaged[prefix or kind.prefix] = (
                f"more than {kind.total_bytes // _MIB} MiB of documents: the rest is not read"
            )
            break
        try:
            documents_found.documents.append(_read(store, kind, entry.key))
        except NotFoundError:
            continue  # removed since it was listed
        except (FormatError, BadNameError) as error:
            documents_found.damaged[entry.key] = error.what
    return documents_found


def _read(store: Store, kind: DocumentKind[Document], key: str) -> Document:
    """Raises as `get_document`, and BadNameError."""
    document = documents.decode(kind.kind, get_document(store, key, kind.max_bytes), key)
    if kind.key is not None and kind.key(document) != key:
        raise FormatError(f"{key}: the document of another attempt", "remove it, or give it its own name")
    return document


def get_document(store: Store, key: str, limit: int) -> bytes:
    """The bytes of one document. In a folder, an object that cannot be read is damaged, for the store itself answers.

    Raises:
        NotFoundError: there is none.
        FormatError: it is over the limit, no regular file, or not readable for this user.
        StoreError: the store does not answer.
    """
    try:
        return store.get(key, limit=limit)
    except (NotFoundError, MissingStoreError):
        raise
    except StoreError as error:
        if not store.is_local:
            raise
        raise FormatError(error.what, error.hint) from error


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


def _whole(documents_found: FoundDocuments[documents.Document]) -> list[documents.Document]:
    """The documents, if all of them can be read.

    Raises:
        FormatError: one of them cannot.
    """
    for key, reason in documents_found.damaged.items():
        raise FormatError(f"{key}: {reason}", "remove it")
    return documents_found.documents


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


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEntry:
    """A run, as far as its small documents tell.

    Attributes:
        project: its project.
        run: its id.
        created_ns: when it was made, nanoseconds since the epoch.
        state: as `watchstep.reading.run_documents.StoredState` has it.
        damage: of a damaged run, which document cannot be read, and why.
    """

    project: str
    run: str
    created_ns: int
    state: str
    damage: str = ""


def find_runs(store: Store) -> list[RunEntry]:
    """The runs of a store, the newest first. Folders without a run's document are left out.

    A run with a document that cannot be read is damaged. A project whose folder cannot be listed is left out, and logged.

    Raises:
        StoreError: the store cannot be read.
    """
    runs = []
    for project in store.folders():
        for run in _runs_of(store, project):
            entry = _entry(store.child(f"{project}/{run}"), project, run)
            if entry is not None:
                runs.append(entry)
    return sorted(runs, key=lambda entry: (-entry.created_ns, entry.project, entry.run))


def _runs_of(store: Store, project: str) -> list[str]:
    try:
        return store.folders(f"{project}/")
    except MissingStoreError:
        raise
    except StoreError as error:
        if not store.is_local:
            raise
        _log.warning("project %r is left out: %s", project, printable(error.what))
        return []


def _entry(store: Store, project: str, run: str) -> RunEntry | None:
    created_ns = 0
    try:
        data = get_document(store, RUN_DOCUMENT, documents.MAX_BYTES)
        created_ns = documents.decode(documents.RunDocument, data, RUN_DOCUMENT).created_ns
        state = read_state(store)
    except NotFoundError:
        return None
    except MissingStoreError:
        raise
    except FormatError as error:
        state = StoredState(DAMAGED, error.what)
    except StoreError as error:  # a folder in the run that cannot be listed
        if not store.is_local:
            raise
        state = StoredState(DAMAGED, error.what)
    return RunEntry(project, run, created_ns, state.state, state.damage)


_PART = re.compile(r"([0-9]{10})\.json")


def count_parts(store: Store, attempt: str) -> int:
    """How many parts the journal of an attempt has, from the first on; 0 where no service judged it.

    Args:
        store: seen from the run.
        attempt: whose.

    Raises:
        StoreError: the store cannot be read.
    """
    prefix = journal_prefix(attempt)
    names = (_PART.fullmatch(entry.key.removeprefix(prefix)) for entry in store.entries(prefix))
    attempts = {int(match[1]) for match in names if match}
    count = 0
    while count in attempts:
        count += 1
    return count


def read_journal(store: Store, attempt: str) -> Iterator[JournalEvaluation]:
    """The evaluations of an attempt in order; one part is held at a time.

    Raises:
        FormatError: a part is damaged, of a later version, or does not follow the one before.
        StoreError: the store cannot be read.
    """
    before: JournalEvaluation | None = None
    for number in range(count_parts(store, attempt)):
        part = read_part(store, attempt, number)
        if before is not None:
            journal.check_order([before, part.evaluations[0]], journal_part(attempt, number))
        before = part.evaluations[-1]
        yield from part.evaluations


def read_part(store: Store, attempt: str, number: int) -> journal.JournalPart:
    """One part of a journal.

    Raises:
        FormatError: it is gone, damaged, or belongs elsewhere.
        StoreError: the store cannot be read.
    """
    key = journal_part(attempt, number)
    try:
        part = journal.decode(store.get(key, limit=journal.MAX_BYTES), key)
    except NotFoundError as error:
        raise FormatError(error.what, "the run can still be judged without its journal") from error
    if (part.attempt, part.number) != (attempt, number):
        raise FormatError(
            f"{key}: part {part.number} of {part.attempt}", "the run can still be judged without its journal"
        )
    return part
