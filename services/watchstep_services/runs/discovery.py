"""Listings of a run on the store: they find attempts, ends and segments that were not announced."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from watchstep.errors import BadNameError, FormatError, NotFoundError
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, EndDocument
from watchstep.format.layout import SegmentKey
from watchstep.reading.run_documents import get_document
from watchstep.store.store import ObjectEntry, Store
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import nanoseconds
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Attempt, RunRow, Segment
from watchstep_services.db.records import MOST_WAITING, hint, put_segments
from watchstep_services.runs import attempts
from watchstep_services.runs.claim import Claim, lock_run
from watchstep_services.service.context import Service
from watchstep_services.service.listings import RefusedDocuments

_ROWS_AT_ONCE = 500
_DOCUMENT_BYTES = 32 * 1024 * 1024
"""Limit of document bytes that one listing reads, valid and damaged ones; the next listing continues."""
_RANK_DIGITS = len(str(attempts.MOST_RANKS))
_ENDS_AT_ONCE = attempts.MOST_RANKS
"""Limit of end documents that one listing reads; the next listing continues."""
MOST_ATTEMPTS = 4_096
"""Limit of attempts of a run that listings find by their documents. Every evaluation of the run loads all of its attempts, 20 µs each. An
attempt with segments that are announced is evaluated nevertheless."""
_ATTEMPTS_AT_ONCE = 500
"""Limit of attempt documents that one listing reads; the next listing continues."""
_ATTEMPTS_OF_WRITE = 50
"""Attempts that one transaction adds, at 1 ms each."""
_SEGMENTS_AT_ONCE = 2_000
"""Limit of segments that one listing adds to the database; the next listing continues."""
_LEAST_SEGMENTS = 200
"""Limit of segments that a listing adds if `MOST_WAITING` wait."""
_MOST_PROBLEMS = 20
"""Limit of objects with problems that a listing reports."""
UNLISTED = "unlisted_segments"
"""Key in a run's health: segments on the store that the last listing left to later ones."""


_Document = TypeVar("_Document", AttemptDocument, EndDocument)


@dataclass
class _Listed:
    """What a listing found. Its memory does not grow with the number of objects on the store.

    Attributes:
        attempts: new attempts.
        ends: new ends by attempt.
        new: names of the attempts of both.
        announced: segments that wait in the database and exist.
        fresh: segments to add to the database.
        left: number of the segments that are left to later listings.
        problems: problems by key.
        began_ns: time of the beginning by the database's clock.
    """

    attempts: list[AttemptDocument] = field(default_factory=list)
    ends: dict[str, list[EndDocument]] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    announced: set[SegmentKey] = field(default_factory=set)
    fresh: list[SegmentKey] = field(default_factory=list)
    left: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    began_ns: int = 0

    def note(self, key: str, problem: str) -> None:
        """Record the problem of an object, of some objects at most."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems[key] = problem


@dataclass(frozen=True)
class Listing:
    """The result of listing a run.

    Attributes:
        fresh: there is something new to read, or, with ``forget_at_once``, announcements were deleted.
        complete: the database has every segment on the store.
    """

    fresh: bool
    complete: bool


@dataclass(frozen=True)
class _Known:
    """The database's content before the listing, and its clock at that time. ``attempts`` are those of ``names`` whose document was read."""

    names: set[str]
    attempts: set[str]
    ends: set[tuple[str, int]]
    segments: set[SegmentKey]
    announced: set[SegmentKey]
    at_ns: int


def discover(
    service: Service,
    run_id: int,
    claim: Claim | None = None,
    read: Collection[SegmentKey] = (),
    *,
    forget_at_once: bool = False,
) -> Listing:
    """List a run and add unknown objects to the database, up to some thousands of segments.

    Announcements of segments that do not exist are deleted if they were older than the gap timeout when the listing began.
    Announcements of segments that an evaluation may have read are kept, because its commit needs their rows.

    Args:
        service: the service.
        run_id: id of the run.
        claim: the claim of the calling evaluation; None for other callers.
        read: segments that this evaluation has read.
        forget_at_once: delete younger announcements of segments that do not exist, too. A segment that was announced
            before it was written is found by a later listing.

    Raises:
        FencedError: another worker has claimed the run.
        StoreError: the store did not answer.
    """
    began = time.monotonic()
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        place = run.place
        stored = _known(service, run_id)
    run_store = service.stores.of_run(place, run.run)
    listing = _list(_Documents(run_store, run_id, service.refused_documents), stored, frozenset(read))
    failpoint("discover.listed", run_id)
    gap_ns = 0 if forget_at_once else nanoseconds(service.settings.gap_seconds)
    fresh, forgotten = _record(service, (run_id, claim), listing, stored.at_ns - gap_ns)
    service.listing_times.put(run_id, time.monotonic() - began)
    failpoint("discover.recorded", run_id)
    return Listing(fresh or (forget_at_once and forgotten > 0), complete=not listing.left)


def _known(service: Service, run_id: int) -> _Known:
    with service.database.read() as session:
        rows = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars().all()
        segments = session.execute(
            select(*_OF_KEY, Segment.state).where(Segment.run_id == run_id, Segment.state != "missing")
        )
        keys, announced = set(), set()
        for row in segments:
            key = key_of(row)
            keys.add(key)
            if row.state == "announced":
                announced.add(key)
        return _Known(
            {row.attempt for row in rows},
            {row.attempt for row in rows if row.world_size},
            {(row.attempt, int(rank)) for row in rows for rank in row.ends},
            keys,
            announced,
            read_clock(session),
        )


_OF_KEY = (Segment.attempt, Segment.node, Segment.writer, Segment.seq, Segment.first, Segment.last)


def key_of(row: Any) -> SegmentKey:
    """The key of a segment's row, or of a row with the columns of a key."""
    return SegmentKey(layout.WriterId(row.attempt, row.node, row.writer), row.seq, row.first, row.last)


def corrupt_segments(session: Session, run_id: int) -> dict[str, str]:
    """The segments of a run that evaluations skipped as corrupt: path to problem."""
    rows = session.execute(select(Segment).filter_by(run_id=run_id, state="corrupt")).scalars()
    return {key_of(row).path: row.problem for row in rows}


@dataclass
class _Documents:
    """Reads a run's documents, with a limit of bytes for one listing, and without refused documents.

    Attributes:
        store: the run's store.
        run_id: id of the run.
        refused: documents that this process has refused.
        listing: receives problems.
        left: bytes that may still be read.
    """

    store: Store
    run_id: int
    refused: RefusedDocuments
    listing: _Listed = field(default_factory=_Listed)
    left: int = field(default_factory=lambda: _DOCUMENT_BYTES)

    def read(
        self, kind: type[_Document], entry: ObjectEntry, key_of: Callable[[_Document], str]
    ) -> _Document | None:
        """A document with content that belongs to its key; None if it is damaged or removed, or the limit is reached."""
        problem = self.refused.get(self.run_id, entry.key, entry.size)
        if problem is None:
            if self.left <= 0:
                return None
            self.left -= min(entry.size, documents.MAX_BYTES)
            try:
                data = get_document(self.store, entry.key, documents.MAX_BYTES)
                document = documents.decode(kind, data, entry.key)
                if key_of(document) == entry.key:
                    return document
                problem = f"{entry.key}: contains the document of {key_of(document)}"
            except NotFoundError:
                return None
            except (FormatError, BadNameError) as error:
                problem = error.what
            self.refused.put(self.run_id, entry.key, entry.size, problem)
        self.listing.note(entry.key, problem)
        return None


def _list(run_documents: _Documents, stored: _Known, read: Collection[SegmentKey]) -> _Listed:
    listing = run_documents.listing
    listing.began_ns = stored.at_ns
    _list_attempts(run_documents, stored, listing)
    _list_ends(run_documents, stored, listing)
    _list_segments(run_documents, stored, read)
    return listing


def _list_attempts(run_documents: _Documents, stored: _Known, listing: _Listed) -> None:
    for entry in run_documents.store.entries(layout.ATTEMPTS):
        attempt = entry.key.removeprefix(layout.ATTEMPTS).removesuffix(".json")
        if attempt in stored.attempts or not _has_room(stored, listing, attempt, entry.key):
            continue
        document = run_documents.read(
            AttemptDocument, entry, lambda document: layout.attempt_document(document.attempt)
        )
        if document is not None:  # fields that are not stored are dropped, because they may be long
            listing.attempts.append(replace(document, host="", environment={}, config={}, seeds={}))
            listing.new.add(attempt)
    listing.attempts.sort(key=lambda document: (document.started_ns, document.attempt))


def _has_room(stored: _Known, listing: _Listed, attempt: str, key: str) -> bool:
    """Whether the listing may record an object of this attempt."""
    if attempt in stored.names or attempt in listing.new:
        return True
    total = len(stored.names) + len(listing.new)
    if total >= MOST_ATTEMPTS:
        listing.note(key, f"{key[:200]}: left out; {MOST_ATTEMPTS} attempts of a run are supported")
    return total < MOST_ATTEMPTS and len(listing.new) < _ATTEMPTS_AT_ONCE


def _list_ends(run_documents: _Documents, stored: _Known, listing: _Listed) -> None:
    left = _ENDS_AT_ONCE
    for entry in run_documents.store.entries(layout.ENDS):
        attempt, _, rank = entry.key.removeprefix(layout.ENDS).removesuffix(".json").partition("/")
        if not (rank.isascii() and rank.isdecimal()):
            continue
        if len(rank) > _RANK_DIGITS or int(rank) >= attempts.MOST_RANKS:
            listing.note(
                entry.key,
                f"{entry.key[:200]}: rank out of range; ranks below {attempts.MOST_RANKS} are supported",
            )
            continue
        if (attempt, int(rank)) in stored.ends or not _has_room(stored, listing, attempt, entry.key):
            continue
        left -= 1
        if left < 0:
            return
        end = run_documents.read(EndDocument, entry, functools.partial(_key_of_end, attempt))
        if end is not None:
            # Fields that are not stored are dropped, because many documents are read before they are recorded.
            end = replace(end, reason=end.reason[: attempts.LONGEST_REASON], health={})
            listing.ends.setdefault(attempt, []).append(end)
            listing.new.add(attempt)


def _key_of_end(attempt: str, end: EndDocument) -> str:
    return layout.end_document(attempt, end.worker)


def _list_segments(run_documents: _Documents, stored: _Known, read: Collection[SegmentKey]) -> None:
    """List segments, and choose those that are added to the database.

    Segments of all writers alternate, in each writer's order, so that no writer waits for another one's backlog.
    """
    listing = run_documents.listing
    room = min(_SEGMENTS_AT_ONCE, max(_LEAST_SEGMENTS, MOST_WAITING - len(stored.announced)))
    fresh: list[SegmentKey] = []

    def chosen() -> list[SegmentKey]:
        return sorted(fresh, key=lambda key: (key.seq, key))[:room]

    found = 0
    for key in itertools.chain(read, _segments_of(run_documents.store, listing, read)):
        if key in stored.announced:
            listing.announced.add(key)
        elif key not in stored.segments:
            found += 1
            fresh.append(key)
            if len(fresh) >= 2 * room + _ROWS_AT_ONCE:
                fresh = chosen()
    listing.fresh = sorted(chosen())
    listing.left = found - len(listing.fresh)


def _segments_of(store: Store, listing: _Listed, read: Collection[SegmentKey]) -> Iterator[SegmentKey]:
    """Segments on the store, without those that were read."""
    for entry in store.entries(layout.SEGMENTS):
        try:
            key = SegmentKey.parse(entry.key)
        except FormatError as error:
            listing.note(entry.key, error.what)
            continue
        if key not in read:
            yield key


def _record(
    service: Service,
    of: tuple[int, Claim | None],
    listing: _Listed,
    before_ns: int,
) -> tuple[bool, int]:
    """Write the listing; return whether there is something new to read, and the number of deleted announcements."""
    run_id, claim = of
    fresh, left, forgotten = listing.fresh, listing.left, 0
    something = bool(listing.attempts or listing.ends)
    # In portions, so that a long backlog does not block SQLite's single writer.
    for start in range(0, len(fresh), _ROWS_AT_ONCE):
        with service.database.write() as session:
            if claim is not None:
                lock_run(session, run_id, claim)
            now = read_clock(session)
            added = put_segments(session, run_id, fresh[start : start + _ROWS_AT_ONCE], now, listed=True)
            something |= added > 0
    for start in range(0, len(listing.attempts), _ATTEMPTS_OF_WRITE):
        with service.database.write() as session:
            run = lock_run(session, run_id, claim)
            for document in listing.attempts[start : start + _ATTEMPTS_OF_WRITE]:
                attempts.record_document(session, run, document)
    for portion in _portions(listing.ends):
        with service.database.write() as session:
            lock_run(session, run_id, claim)
            now = read_clock(session)
            for attempt in portion:
                attempts.note_ends(attempts.ensure(session, run_id, attempt), listing.ends[attempt], now)
    with service.database.write() as session:
        # The run's row is locked first, as in every other transaction, to avoid deadlocks.
        run = lock_run(session, run_id, claim)
        now = read_clock(session)
        if claim is not None or run.lease_until_ns <= now:
            forgotten = _delete_bogus(session, run, before_ns, listing, claimed=claim is not None)
        run.listed_ns = now
        if not left and run.ignored_ns < listing.began_ns:
            run.ignored_ns = 0
        if fresh:
            run.last_seen_ns = now
        if listing.problems:
            run.health = {**run.health, "documents": dict(sorted(listing.problems.items()))}
        if left or UNLISTED in run.health:
            others = {name: value for name, value in run.health.items() if name != UNLISTED}
            run.health = {**others, UNLISTED: left} if left else others
        if something:
            session.flush()
            hint(session, run_id)
    return something, forgotten


def _portions(ends: dict[str, list[EndDocument]]) -> Iterator[list[str]]:
    """Attempts with all their ends, grouped by the transaction that records them."""
    portion: list[str] = []
    size = 0
    for attempt, documents_of in ends.items():
        portion.append(attempt)
        size += len(documents_of)
        if size >= _ROWS_AT_ONCE or len(portion) >= _ATTEMPTS_OF_WRITE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _delete_bogus(session: Session, run: RunRow, before_ns: int, listing: _Listed, *, claimed: bool) -> int:
    """Delete old announcements of segments that the listing did not find; return their number."""
    announced = session.execute(
        select(Segment.id, Segment.found_ns, *_OF_KEY).filter_by(run_id=run.id, state="announced")
    )
    existing = listing.announced.union(listing.fresh)
    bogus = [row.id for row in announced if row.found_ns <= before_ns and key_of(row) not in existing]
    if not bogus:
        return 0
    for start in range(0, len(bogus), _ROWS_AT_ONCE):
        session.execute(delete(Segment).where(Segment.id.in_(bogus[start : start + _ROWS_AT_ONCE])))
    if not claimed:
        # An evaluation that was paused past its lease may have read a segment after the listing; this fences its commit.
        run.epoch += 1
    return len(bogus)


def listing_due(service: Service, place: StorePlace, run_id: int, quiet_since_ns: int, now_ns: int) -> bool:
    """Whether a run has been quiet long enough for a listing of its store."""
    pause_ns = max(service.settings.listing_ns(local=place.is_local), service.listing_times.pause_ns(run_id))
    return now_ns - quiet_since_ns >= pause_ns
