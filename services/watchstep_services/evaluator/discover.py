"""Look at the store itself: attempts, ends and segments that nobody announced."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import delete, select

from watchstep import documents, layout
from watchstep.documents import AttemptDocument, EndDocument
from watchstep.errors import FormatError
from watchstep.layout import SegmentKey
from watchstep.store import Store
from watchstep_services.database.clock import read_clock
from watchstep_services.database.models import Attempt, Project, Run, Segment
from watchstep_services.database.records import hint, put_segment
from watchstep_services.evaluator import attempts
from watchstep_services.evaluator.claim import Claim
from watchstep_services.evaluator.fence import lock_run
from watchstep_services.points import reach
from watchstep_services.service import Service
from watchstep_services.settings import nanoseconds
from watchstep_services.stores.place import StorePlace

_ROWS_AT_ONCE = 500


@dataclass
class _Found:
    attempts: list[AttemptDocument] = field(default_factory=list)
    ends: list[tuple[str, EndDocument]] = field(default_factory=list)
    segments: set[SegmentKey] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Known:
    attempts: set[str]
    ends: set[tuple[str, int]]
    segments: set[SegmentKey]


def discover(service: Service, run_id: int, held: Claim | None = None) -> bool:
    """List a run and put what was not known into the database.

    Announcements of segments that do not exist are forgotten once they are older than the gap time.

    Args:
        service: the service.
        run_id: of the run.
        held: the claim of the evaluation that looks; None where somebody else does.

    Returns:
        Whether there is something new to read.

    Raises:
        FencedError: another worker has taken the run.
        StoreError: the store did not answer.
    """
    with service.database.read() as session:
        run = session.get_one(Run, run_id)
        place = session.get_one(Project, run.project).place
        known = _known(service, run_id)
    run_store = service.stores.of_run(place, run.run)
    found = _list(run_store, known)
    reach("discover.listed", run_id)
    fresh = _record(service, (run_id, held), known, found)
    reach("discover.recorded", run_id)
    return fresh


def _known(service: Service, run_id: int) -> _Known:
    with service.database.read() as session:
        rows = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars().all()
        segments = session.execute(
            select(Segment).where(Segment.run_id == run_id, Segment.state != "missing")
        ).scalars()
        return _Known(
            {row.attempt for row in rows if row.world_size},
            {(row.attempt, int(rank)) for row in rows for rank in row.ends},
            {key_of(row) for row in segments},
        )


def key_of(row: Segment) -> SegmentKey:
    """The key of an inbox row."""
    return SegmentKey(layout.WriterId(row.attempt, row.node, row.writer), row.seq, row.first, row.last)


def _list(run_store: Store, known: _Known) -> _Found:
    found = _Found()
    for entry in run_store.entries(layout.ATTEMPTS):
        attempt = entry.key.removeprefix(layout.ATTEMPTS).removesuffix(".json")
        if attempt not in known.attempts:
            _read_attempt(run_store, entry.key, found)
    for entry in run_store.entries(layout.ENDS):
        attempt, _, rank = entry.key.removeprefix(layout.ENDS).removesuffix(".json").partition("/")
        if rank.isdecimal() and (attempt, int(rank)) not in known.ends:
            _read_end(run_store, entry.key, attempt, found)
    for entry in run_store.entries(layout.SEGMENTS):
        try:
            found.segments.add(SegmentKey.parse(entry.key))
        except FormatError as error:
            found.problems[entry.key] = error.what
    found.attempts.sort(key=lambda document: (document.started_ns, document.attempt))
    return found


def _read_attempt(run_store: Store, key: str, found: _Found) -> None:
    try:
        document = documents.decode(AttemptDocument, run_store.get(key, limit=documents.MAX_BYTES), key)
        _check_key(key, layout.attempt_document(document.attempt))
    except FormatError as error:
        found.problems[key] = error.what
    else:
        found.attempts.append(document)


def _read_end(run_store: Store, key: str, attempt: str, found: _Found) -> None:
    try:
        end = documents.decode(EndDocument, run_store.get(key, limit=documents.MAX_BYTES), key)
        _check_key(key, layout.end_document(attempt, end.worker))
    except FormatError as error:
        found.problems[key] = error.what
    else:
        found.ends.append((attempt, end))


def _check_key(key: str, expected: str) -> None:
    if key != expected:
        raise FormatError(f"{key}: its content belongs to {expected}", "write it anew, or remove it")


def _record(service: Service, of: tuple[int, Claim | None], known: _Known, found: _Found) -> bool:
    run_id, held = of
    gap_ns = nanoseconds(service.settings.gap_seconds)
    fresh = sorted(found.segments - known.segments)
    something = bool(found.attempts or found.ends)
    # In portions, so that a long backlog does not hold SQLite's one writer.
    for start in range(0, len(fresh), _ROWS_AT_ONCE):
        with service.database.write() as session:
            if held is not None:
                lock_run(session, run_id, held)
            now = read_clock(session)
            for key in fresh[start : start + _ROWS_AT_ONCE]:
                something |= put_segment(session, run_id, key, now, listed=True)
    with service.database.write() as session:
        # The run's row first, as every other transaction takes it, so that none waits for another in a circle.
        run = lock_run(session, run_id, held)
        now = read_clock(session)
        for document in found.attempts:
            attempts.found(session, run, document)
        for attempt, end in found.ends:
            row = attempts.ensure(session, run_id, attempt)
            row.ends = {**row.ends, str(end.worker): attempts.end_as_data(end, now)}
        announced = session.execute(select(Segment).filter_by(run_id=run_id, state="announced")).scalars()
        bogus = [
            row.id for row in announced if row.found_ns + gap_ns <= now and key_of(row) not in found.segments
        ]
        if bogus:
            session.execute(delete(Segment).where(Segment.id.in_(bogus)))
        run.listed_ns = now
        if found.segments - known.segments:
            run.heard_ns = now
        if found.problems:
            run.health = {**run.health, "documents": dict(sorted(found.problems.items())[:20])}
        if something:
            session.flush()
            hint(session, run_id)
    return something


def listing_due(service: Service, place: StorePlace, quiet_since_ns: int, now_ns: int) -> bool:
    """Whether a run has been quiet for so long that its store is worth a listing."""
    return now_ns - quiet_since_ns >= service.settings.listing_ns(local=place.is_local)
