"""Announced segments enter the inbox of their run: with one statement on PostgreSQL, with a transaction of several on SQLite.

The statement locks the run's row, adds the segments, makes the run due and returns the control document. It neither begins nor ends
a transaction, because both cost a round trip, and announcements are most of a service's requests. SQLite has no statement that changes
two tables. Both have the same effect.

Announcements are ignored beyond `MOST_WAITING` waiting segments of a run and a limit of its project, because any recorder can announce
segments that do not exist. The store has those that do, and listings find them: from an ignored announcement until a listing, announcements
do not postpone the run's poll, and the run does not count as one that announces (`scheduler.polling`). Segments that follow one that was read are accepted, so that
made-up announcements do not delay the writers of a run.

A segment that was given up as missing is due again if it is announced late. On PostgreSQL a second transaction does that, because a
statement does not see rows that were written after it began, for example while it waited for the lock of the run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Dialect, TextClause, bindparam, func, literal, select, text, update
from sqlalchemy.orm import Session

from watchstep.format.layout import SegmentKey, WriterId
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import tracing
from watchstep_services.db.clock import clock_expression, now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project, RunRow, Segment
from watchstep_services.db.records import MOST_WAITING, RUNS, hint, put_segments
from watchstep_services.service.waiting_segments import WaitingRoom
from watchstep_services.tenancy import archived

MOST_WRITERS = 1024
"""Writers with health in a run's row."""

MOST_HEALTH_BYTES = 1024 * 1024
"""Health of all writers of a run. The row is read with every request about the run."""

FOLLOWING = 8
"""Segments after one that was read that are accepted of a writer even if there is no room. Writers flush less often than runs are evaluated."""

URGENT_INTERVAL_NS = 60 * NANOSECONDS
"""Interval at which announcements may mark a run as urgent. A run that is always urgent has priority for a quarter of the time."""


@dataclass(frozen=True)
class Announcement:
    """Segments of one attempt, which one recorder has written.

    Attributes:
        keys: at least one segment, each only once.
        health: the recorder's health; empty for none.
        urgent: values have just become NaN or infinite.
    """

    keys: Sequence[SegmentKey]
    health: Mapping[str, Any]
    urgent: bool

    @property
    def reporter(self) -> str:
        """The writer whose health is reported: that of the last segment."""
        writer = self.keys[-1].writer
        return f"{writer.node}/{writer.writer}"


@dataclass(frozen=True)
class AcceptedAnnouncement:
    """The result of an announcement.

    Attributes:
        run_id: id of the run.
        fresh: number of segments that are new to the inbox.
        ignored: number of segments that were not added, because too many wait.
        lag_ns: time for which the run had been due before; None if it was not.
        control: the control document, as JSON.
        cached_by: the worker that has cached the run's earlier rows; empty for none.
        health_before: the previous health of the reporting recorder; empty without one.
        evaluated: whether rows of the run were evaluated since its last registration.
    """

    run_id: int
    fresh: int
    ignored: int
    lag_ns: int | None
    control: str
    cached_by: str
    health_before: Mapping[str, Any]
    evaluated: bool


def accept_announcement(
    database: Database, waiting_room: WaitingRoom, project: str, run: str, announcement: Announcement
) -> AcceptedAnnouncement | None:
    """Add segments to the inbox of a run; None if the run does not exist.

    Raises:
        ConflictError: the project is archived.
    """
    room = waiting_room.of(project, functools.partial(_count_waiting, database, project, waiting_room.most))
    accepted = _accept(database, room, project, run, announcement)
    if accepted is not None and accepted.fresh:
        waiting_room.take(project, accepted.fresh)
    return accepted


def _accept(
    database: Database, room: int, project: str, run: str, announcement: Announcement
) -> AcceptedAnnouncement | None:
    if database.engine.dialect.name == "sqlite":
        with database.write() as session:
            return _accept_by_statements(session, room, project, run, announcement)
    accepted, chosen = _accept_at_once(database, room, project, run, announcement)
    if accepted is None or accepted.fresh == len(chosen):
        return accepted
    with database.write() as session:
        again = _accept_by_statements(session, None, project, run, replace(announcement, keys=chosen))
    if again is None or not again.fresh:
        return accepted
    return replace(
        accepted,
        fresh=accepted.fresh + again.fresh,
        control=again.control,
        cached_by=again.cached_by,
        evaluated=again.evaluated,
    )


def _count_waiting(database: Database, project: str, most: int) -> int:
    """Waiting segments of a project, at most ``most``."""
    waiting = (
        select(literal(1))
        .select_from(Segment)
        .join(RunRow, RunRow.id == Segment.run_id)
        .where(RunRow.project == project, Segment.state == "announced")
        .limit(most)
    )
    with database.read() as session:
        return session.execute(select(func.count()).select_from(waiting.subquery())).scalar_one()


def _accept_at_once(
    database: Database, room: int, project: str, run: str, announcement: Announcement
) -> tuple[AcceptedAnnouncement | None, Sequence[SegmentKey]]:
    """Execute the statement; also return the segments that were not ignored."""
    segments = [
        (key.writer.node, key.writer.writer, key.seq, key.first, key.last) for key in announcement.keys
    ]
    values = {
        "project": project,
        "run": run,
        "attempt": announcement.keys[0].writer.attempt,
        "segments": json.dumps([dict(zip(_NAMES, segment, strict=True)) for segment in segments]),
        "project_room": room,
        "traceparent": tracing.current(),
        "urgent": announcement.urgent,
        "reporter": announcement.reporter,
        "report": json.dumps(announcement.health) if announcement.health else None,
    }
    with database.bare() as connection:
        row = connection.execute(_at_once(connection.dialect), values).one_or_none()
    if row is None:
        return None, ()
    run_id, archived_ns, fresh, places, lag_ns, control, cached_by, health, evaluated = row
    if archived_ns is not None:
        raise archived(project)
    keys = announcement.keys
    chosen = keys if places is None else [keys[place - 1] for place in places]
    ignored = len(keys) - len(chosen)
    return AcceptedAnnouncement(
        run_id, fresh, ignored, lag_ns, control, cached_by, health or {}, evaluated
    ), chosen


_NAMES = ("node", "writer", "seq", "first", "last")


@functools.lru_cache(maxsize=8)
def _at_once(dialect: Dialect) -> TextClause:
    limits = {
        "now": clock_expression(dialect),
        "most_writers": MOST_WRITERS,
        "most_bytes": MOST_HEALTH_BYTES,
        "most_waiting": MOST_WAITING,
        "following": FOLLOWING,
        "urgent_interval": URGENT_INTERVAL_NS,
    }
    statement = _AT_ONCE
    for name, value in limits.items():
        statement = statement.replace(f"{{{name}}}", str(value))
    return text(statement)


# The first clause returns the newest version of the row, even if it was changed after the statement began. Everything else reads
# from it. The changes of a run equal those of `records.hint`. JSON is not converted to jsonb, which would change numbers.
_AT_ONCE = """
WITH locked AS (
    SELECT runs.id, runs.due_ns, runs.poll_interval_ns, runs.ignored_ns, runs.urgent_ns, runs.health, runs.control, runs.cached_by,
        runs.evaluated_ns > runs.registered_ns AS evaluated,
        {now} AS now_ns, projects.archived_ns
    FROM runs JOIN projects ON projects.name = runs.project
    WHERE runs.project = :project AND runs.run = :run
    FOR NO KEY UPDATE OF runs
), accepted AS (
    SELECT *, coalesce(due_ns <= now_ns, false) AS waits FROM locked WHERE archived_ns IS NULL
), room AS (
    SELECT least({most_waiting} - count(*), CAST(:project_room AS bigint)) AS segments FROM (
        SELECT FROM accepted JOIN segments ON segments.run_id = accepted.id AND segments.state = 'announced' LIMIT {most_waiting}
    ) AS waiting
), chosen AS (
    SELECT accepted.id AS run_id, now_ns, announced.* FROM accepted, room, ROWS FROM (
        json_to_recordset(CAST(:segments AS json)) AS (node varchar, writer varchar, seq bigint, first bigint, last bigint)
    ) WITH ORDINALITY AS announced (node, writer, seq, first, last, place)
    WHERE place <= room.segments OR EXISTS (
        SELECT FROM segments AS earlier
        WHERE earlier.run_id = accepted.id AND earlier.attempt = CAST(:attempt AS varchar)
            AND earlier.node = announced.node AND earlier.writer = announced.writer
            AND earlier.seq >= announced.seq - {following} AND earlier.seq < announced.seq
            AND earlier.state IN ('read', 'corrupt')
    )
), ignored AS (
    SELECT json_array_length(CAST(:segments AS json)) > (SELECT count(*) FROM chosen) AS some
), inserted AS (
    INSERT INTO segments (run_id, attempt, node, writer, seq, first, last, state, found_ns, problem, traceparent)
    SELECT run_id, CAST(:attempt AS varchar), node, writer, seq, first, last, 'announced', now_ns, '',
        CAST(:traceparent AS varchar)
    FROM chosen
    ON CONFLICT DO NOTHING
    RETURNING 1
), fresh AS (
    SELECT count(*) AS segments FROM inserted
), recorders AS (
    SELECT json_object_agg(key, value) AS reports
    FROM accepted, LATERAL (
        SELECT key, value FROM json_each(health -> 'recorders') WHERE key <> CAST(:reporter AS text)
        UNION ALL SELECT CAST(:reporter AS text), CAST(:report AS json)
    ) AS reported
    WHERE CAST(:report AS json) IS NOT NULL
    HAVING count(*) BETWEEN 1 AND {most_writers} AND sum(octet_length(key) + octet_length(CAST(value AS text))) <= {most_bytes}
), changed AS (
    UPDATE runs SET
        last_seen_ns = now_ns,
        poll_ns = CASE
            WHEN accepted.poll_interval_ns > 0 AND accepted.ignored_ns = 0 AND NOT ignored.some THEN now_ns + accepted.poll_interval_ns
            ELSE poll_ns END,
        ignored_ns = CASE WHEN ignored.some THEN now_ns ELSE accepted.ignored_ns END,
        urgent_ns = CASE
            WHEN CAST(:urgent AS boolean) AND now_ns - accepted.urgent_ns > {urgent_interval} THEN now_ns
            ELSE accepted.urgent_ns END,
        hints = hints + least(fresh.segments, 1),
        due_ns = CASE WHEN waits OR fresh.segments = 0 THEN accepted.due_ns ELSE now_ns END,
        requested_ns = CASE WHEN waits OR fresh.segments = 0 THEN requested_ns ELSE now_ns END,
        health = coalesce((
            SELECT json_object_agg(key, value) FROM (
                SELECT key, value FROM json_each(accepted.health) WHERE key <> 'recorders'
                UNION ALL SELECT 'recorders', reports FROM recorders
            ) AS parts WHERE EXISTS (SELECT FROM recorders)
        ), accepted.health)
    FROM accepted, fresh, ignored WHERE runs.id = accepted.id
)
SELECT locked.id, archived_ns, fresh.segments, CASE WHEN room.segments < json_array_length(CAST(:segments AS json))
        THEN coalesce((SELECT json_agg(place ORDER BY place) FROM chosen), '[]') END,
    CASE WHEN due_ns <= now_ns THEN now_ns - due_ns END, CAST(control AS text), cached_by,
    CASE WHEN CAST(:report AS json) IS NOT NULL THEN health -> 'recorders' -> CAST(:reporter AS text) END, evaluated
FROM locked, fresh, room
"""


# Built once, because every announcement on SQLite executes it. With `key_share`, inserts that reference the run do not wait for it.
_LOCKED_RUN = (
    select(
        RunRow.id,
        RunRow.due_ns,
        RunRow.poll_interval_ns,
        RunRow.ignored_ns,
        RunRow.urgent_ns,
        RunRow.health,
        RunRow.control,
        RunRow.cached_by,
        (RunRow.evaluated_ns > RunRow.registered_ns).label("evaluated"),
        now_ns().label("now_ns"),
        Project.archived_ns,
    )
    .join(Project, Project.name == RunRow.project)
    .where(RunRow.project == bindparam("project"), RunRow.run == bindparam("run"))
    .with_for_update(of=RunRow, key_share=True)
)


def _accept_by_statements(
    session: Session, room: int | None, project: str, run: str, announcement: Announcement
) -> AcceptedAnnouncement | None:
    row = session.execute(_LOCKED_RUN, {"project": project, "run": run}).one_or_none()
    if row is None:
        return None
    if row.archived_ns is not None:
        raise archived(project)
    now = row.now_ns
    lag_ns = now - row.due_ns if row.due_ns is not None and row.due_ns <= now else None
    changes: dict[str, Any] = {"last_seen_ns": now}
    if announcement.urgent and now - row.urgent_ns > URGENT_INTERVAL_NS:
        changes["urgent_ns"] = now
    before = row.health.get("recorders", {}).get(announcement.reporter, {}) if announcement.health else {}
    health = _with_report(row.health, announcement)
    if health is not None:
        changes["health"] = health
    keys = announcement.keys if room is None else _chosen(session, room, row.id, announcement.keys)
    ignored = len(announcement.keys) - len(keys)
    if ignored:
        changes["ignored_ns"] = now
    elif row.poll_interval_ns and not row.ignored_ns:
        changes["poll_ns"] = now + row.poll_interval_ns
    fresh = put_segments(session, row.id, keys, now)
    if fresh:
        hint(session, row.id, requested=True, also=changes)
    else:
        session.execute(update(RUNS).where(RUNS.c.id == row.id).values(changes))
    return AcceptedAnnouncement(
        row.id, fresh, ignored, lag_ns, json.dumps(row.control), row.cached_by, before, row.evaluated
    )


_WRITERS_LOOKED_UP = 8
"""Writers of an announcement for which there is no room whose segments are looked up. A recorder announces those of one; each costs a query."""


def _chosen(session: Session, room: int, run_id: int, keys: Sequence[SegmentKey]) -> Sequence[SegmentKey]:
    """The segments for which there is room, and those that follow one that was read."""
    waiting = select(Segment.id).filter_by(run_id=run_id, state="announced").limit(MOST_WAITING).subquery()
    room = min(room, MOST_WAITING - session.execute(select(func.count()).select_from(waiting)).scalar_one())
    if len(keys) <= room:
        return keys
    writers = list(dict.fromkeys(key.writer for key in keys[max(0, room) :]))[:_WRITERS_LOOKED_UP]
    newest = {writer: _newest_read(session, run_id, writer) for writer in writers}
    follows = {
        key
        for key in keys
        if key.writer in newest and newest[key.writer] < key.seq <= newest[key.writer] + FOLLOWING
    }
    return [key for place, key in enumerate(keys) if place < room or key in follows]


def _newest_read(session: Session, run_id: int, writer: WriterId) -> int:
    """Number of the last segment of a writer that was read; without one, so that none follows."""
    read = select(Segment.seq).where(
        Segment.run_id == run_id,
        Segment.attempt == writer.attempt,
        Segment.node == writer.node,
        Segment.writer == writer.writer,
        Segment.state.in_(("read", "corrupt")),
    )
    seq = session.execute(read.order_by(Segment.seq.desc()).limit(1)).scalar()
    return -FOLLOWING - 1 if seq is None else seq


def _with_report(run_health: Mapping[str, Any], announcement: Announcement) -> dict[str, Any] | None:
    """Return the health of a run with that of the reporting recorder; None if it does not change, or would be too large."""
    if not announcement.health:
        return None
    recorders = {**run_health.get("recorders", {}), announcement.reporter: announcement.health}
    if len(recorders) > MOST_WRITERS or len(json.dumps(recorders)) > MOST_HEALTH_BYTES:
        return None
    return {**run_health, "recorders": recorders}
