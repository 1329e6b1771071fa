"""The documents of a run and its journal, the run's state as far as the store determines it, and the runs of a store.

Everyone with write access to a store can put anything into a run: pipes, large objects, or millions of small ones. Reading one
kind of document is bounded, and what exceeds the bound counts as damaged; a damaged document does not affect others.

The service knows more than the store: whether a job is alive, and when it last reported. A run that is
``running`` or ``lost`` in the service is ``open`` in the store.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_ENTRY_BYTES = 512
"""Bytes that each object of a listing counts for in addition to its size, because listing and opening it takes time."""


@dataclass(frozen=True)
class DocumentKind(Generic[Document]):
    """A kind of document, and limits for reading it.

    Attributes:
        kind: class of the document.
        prefix: its prefix, relative to the run.
        max_bytes: size limit of one document.
        total_bytes: size limit of all documents of one prefix.
        key: returns the key that a document belongs to; None if it has several.
    """

    kind: type[Document]
    prefix: str
    max_bytes: int
    total_bytes: int
    key: Callable[[Document], str] | None = None


ATTEMPT = DocumentKind(
    documents.AttemptDocument, ATTEMPTS, 65536, 8 * _MIB, lambda read: attempt_document(read.attempt)
)
"""A document has some 3 kB: up to 2,000 attempts are read."""

LAUNCH = DocumentKind(
    documents.LaunchDocument, LAUNCHES, 65536, 8 * _MIB, lambda read: launch_document(read.attempt)
)

END = DocumentKind(documents.EndDocument, ENDS, documents.MAX_BYTES, 128 * _MIB)
"""A document has some kilobytes: those of up to 16,384 ranks are read."""


@dataclass
class FoundDocuments(Generic[Document]):
    """Documents below a prefix, and errors of the others.

    Attributes:
        documents: readable documents, in the order of the listing.
        damaged: key → error; a prefix if its documents exceed the limit.
    """

    documents: list[Document] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


def read_documents(store: Store, kind: DocumentKind[Document], prefix: str = "") -> FoundDocuments[Document]:
    """Read the documents of one kind.

    Args:
        store: the run's store.
        kind: kind of document.
        prefix: only documents below it; all if empty.

    Raises:
        StoreError: the store cannot be read.
    """
    result: FoundDocuments[Document] = FoundDocuments()
    remaining = kind.total_bytes
    for entry in store.entries(prefix or kind.prefix):
        remaining -= _ENTRY_BYTES + (entry.size if entry.size <= kind.max_bytes else 0)
        if remaining < 0:
            result.damaged[prefix or kind.prefix] = (
                f"more than {kind.total_bytes // _MIB} MiB of documents; the rest is not read"
            )
            break
        try:
            result.documents.append(_read(store, kind, entry.key))
        except NotFoundError:
            continue  # removed after listing
        except (FormatError, BadNameError) as error:
            result.damaged[entry.key] = error.what
    return result


def _read(store: Store, kind: DocumentKind[Document], key: str) -> Document:
    """Read a document. Raises as `get_document`, and BadNameError."""
    document = documents.decode(kind.kind, get_document(store, key, kind.max_bytes), key)
    if kind.key is not None and kind.key(document) != key:
        raise FormatError(f"{key} is the document of another attempt", "remove it, or rename it")
    return document


def get_document(store: Store, key: str, limit: int) -> bytes:
    """Return the bytes of one document. In a folder, an unreadable object counts as damaged, because the store itself answers.

    Raises:
        NotFoundError: it does not exist.
        FormatError: it exceeds the limit, is not a regular file, or is not readable for this user.
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
    """A run's state, as far as its documents determine it.

    Attributes:
        state: ``created``; ``ended``: its program, which ``watchstep run`` started on this machine, has ended without
            records; ``open``: it records, or ended without an end document; ``stopping``: a stop was requested, and no worker has ended
            yet; ``completed``, ``failed`` or ``stopped``: how its newest attempt ended; ``damaged``: a document cannot be read.
        damage: for a damaged run, the document and the error; otherwise empty.
    """

    state: str
    damage: str = ""


def read_state(store: Store) -> StoredState:
    """Determine the state of a run.

    Args:
        store: the run's store.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        newest = newest_attempt(_whole(read_documents(store, ATTEMPT)))
        # Ends without an attempt belong to a run with a lost claim; they are the only information.
        ends = _whole(read_documents(store, END, "" if newest is None else f"{ENDS}{newest.attempt}/"))
        if newest is None:
            return StoredState(_ended(ends, len(ends), stop_requested=False) if ends else _unrecorded(store))
        return StoredState(
            _ended(ends, newest.world_size, stop_requested=_is_stop_requested(store, newest.attempt))
        )
    except FormatError as error:
        return StoredState(DAMAGED, error.what)


def newest_attempt(attempts: Iterable[documents.AttemptDocument]) -> documents.AttemptDocument | None:
    """Return the attempt that started last, by the clocks of the machines; None without one."""
    return max(attempts, key=lambda read: (read.started_ns, read.attempt), default=None)


def _whole(result: FoundDocuments[documents.Document]) -> list[documents.Document]:
    """Return the documents if all of them are readable.

    Raises:
        FormatError: a document is damaged.
    """
    for key, reason in result.damaged.items():
        raise FormatError(f"{key}: {reason}", "remove it")
    return result.documents


def _ended(ends: Sequence[documents.EndDocument], workers: int, *, stop_requested: bool) -> str:
    """Return the state of an attempt.

    Args:
        ends: end documents of its workers.
        workers: number of workers.
        stop_requested: whether a stop was requested. A worker that ends by SIGTERM reports a failure, because it does not know the
            sender. A worker that fails by itself, for instance by an exception, was not stopped, whatever was requested.
    """
    states = {end.state for end in ends}
    terminated = any(end.state == "failed" and end.reason.startswith(documents.TERMINATED) for end in ends)
    if "stopped" in states or (stop_requested and terminated):
        return "stopped"
    if "failed" in states:
        return "failed"
    if ends and len(ends) >= workers:
        return "completed"
    return "stopping" if stop_requested and not ends else "open"


def _unrecorded(store: Store) -> str:
    """Return the state of a run without records: whether the process of its newest launch has ended, if that is visible from here."""
    launches = _whole(read_documents(store, LAUNCH))
    newest = max(launches, key=lambda read: (read.launched_ns, read.attempt), default=None)
    return "ended" if newest is not None and _is_over(newest) else "created"


def _is_over(launch: documents.LaunchDocument) -> bool:
    try:
        here = (boot_id(), pid_namespace())
    except ConfigError:
        return False  # not on Linux
    if not launch.namespace or here != (launch.boot, launch.namespace):
        return False
    return not ProcessIdentity(launch.pid, launch.start_ticks, launch.boot, launch.host).is_running()


def _is_stop_requested(store: Store, attempt: str) -> bool:
    try:
        control = ControlDocument.decode(get_document(store, CONTROL_DOCUMENT, MAX_BYTES))
    except NotFoundError:
        return False
    return control.stop is not None and control.stop.attempt == attempt


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEntry:
    """A run in a list of runs.

    Attributes:
        project: its project.
        run: its id.
        created_ns: time of creation, in nanoseconds since the epoch.
        state: as in `watchstep.reading.run_documents.StoredState`.
        damage: for a damaged run, the document and the error.
    """

    project: str
    run: str
    created_ns: int
    state: str
    damage: str = ""


def find_runs(store: Store) -> list[RunEntry]:
    """Return the runs of a store, newest first. Folders without a run document are omitted.

    A run with an unreadable document is damaged. A project whose folder cannot be listed is omitted, and logged.

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
        _log.warning("project %r is omitted: %s", project, printable(error.what))
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
    """Return the number of consecutive parts of an attempt's journal; 0 if no service evaluated it.

    Args:
        store: the run's store.
        attempt: the attempt.

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
    """Yield the evaluations of an attempt in order; one part is in memory at a time.

    Raises:
        FormatError: a part is damaged, has a later version, or does not continue the previous one.
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
    """Read one part of a journal.

    Raises:
        FormatError: it is missing, damaged, or belongs to another attempt.
        StoreError: the store cannot be read.
    """
    key = journal_part(attempt, number)
    try:
        part = journal.decode(store.get(key, limit=journal.MAX_BYTES), key)
    except NotFoundError as error:
        raise FormatError(error.what, "backtest the run without its journal") from error
    if (part.attempt, part.number) != (attempt, number):
        raise FormatError(
            f"{key} is part {part.number} of {part.attempt}", "backtest the run without its journal"
        )
    return part
