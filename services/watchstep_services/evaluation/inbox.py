"""The unread part of a run at its claim: segments, attempts and cursor, and which segments to read in which order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Select,
    any_,
    bindparam,
    exists,
    func,
    select,
)
from sqlalchemy.orm import aliased

from watchstep.format.layout import SegmentKey, WriterId
from watchstep_rules.engine.alert import Phase
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertInstanceRow, Attempt, RunRow, Segment
from watchstep_services.db.records import MOST_WAITING

MOST_ENTRIES = 2 * MOST_WAITING
"""Entries that an inbox has: as many as announcements and listings add, with room for those of several processes at the same time. Of
more, the first of each writer are loaded, so that no gap is found where there is none."""

FAILED_ATTEMPTS = "failed_attempts"
"""Key in a run's health: attempt → why its last evaluation failed."""


@dataclass(frozen=True)
class Inbox:
    """The unread segments and the attempts of a run.

    Attributes:
        entries: announced segments that have not been read, at most `MOST_ENTRIES`.
        attempts: rows of the run's attempts, by name; read-only.
        calm: no alert of the run fires, and its last evaluation did not fail.
        failing: attempts with a failed last evaluation; they are read after the others.
    """

    entries: list[InboxEntry]
    attempts: dict[str, Attempt]
    calm: bool
    failing: frozenset[str] = frozenset()

    @property
    def is_cut(self) -> bool:
        """Whether there may be more entries, after those of the same writers."""
        return len(self.entries) >= MOST_ENTRIES


def open_inbox(database: Database, run_id: int) -> Inbox:
    """Load a run's inbox."""
    return open_inboxes(database, [run_id])[run_id]


def open_inboxes(database: Database, run_ids: Sequence[int]) -> dict[int, Inbox]:
    """Load the inboxes of runs: with one statement on PostgreSQL, with three for each run on SQLite, which has no `json_agg`."""
    with database.bare() as connection:
        if connection.dialect.name == "sqlite":
            return {run_id: _open_by_statements(connection, {"of_run": run_id}) for run_id in run_ids}
        rows = connection.execute(_AT_ONCE, {"of_runs": list(run_ids)}).all()
    inboxes = {
        run_id: _opened(segments or (), attempts or (), *troubles)
        for run_id, segments, attempts, *troubles in rows
    }
    # A run that was deleted meanwhile has nothing to read.
    return {run_id: inboxes.get(run_id) or Inbox([], {}, calm=True) for run_id in run_ids}


def _open_by_statements(connection: Connection, of: dict[str, Any]) -> Inbox:
    segments = connection.execute(_SEGMENTS, of).all()
    attempts = connection.execute(_ATTEMPTS, of).all()
    return _opened(segments, attempts, *connection.execute(select(*_TROUBLES), of).one())


def _opened(segments: Any, attempts: Any, fires: Any, failed: Any, failing: Any) -> Inbox:
    entries = [
        InboxEntry(row_id, SegmentKey(WriterId(attempt, node, writer), seq, first, last), found_ns, trace)
        for row_id, attempt, node, writer, seq, first, last, found_ns, trace in segments
    ]
    rows = [Attempt(**dict(zip(_NAMES, values, strict=True))) for values in attempts]
    calm = not (fires or failed or failing)
    return Inbox(entries, {row.attempt: row for row in rows}, calm, frozenset(failing or ()))


# Built once, because every evaluation executes it.
_OF_SEGMENT = (
    Segment.id, Segment.attempt, Segment.node, Segment.writer, Segment.seq, Segment.first, Segment.last,
    Segment.found_ns, Segment.traceparent,
)  # fmt: skip
_NAMES = [column.key for column in Attempt.__table__.columns]
_OF_ATTEMPT = [getattr(Attempt, name) for name in _NAMES]


def _waits(run: ColumnElement[Any]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Segment.run_id == run, Segment.state == "announced"


def _troubles(run: ColumnElement[Any]) -> tuple[ColumnElement[Any], ...]:
    """Whether an alert of the run fires, whether its last evaluation failed, and its failing attempts."""
    of_run = aliased(RunRow)
    fires = exists().where(AlertInstanceRow.run_id == run, AlertInstanceRow.phase == Phase.FIRING.value)
    failed = select(of_run.health["evaluation"].as_string().is_not(None)).where(of_run.id == run)
    failing = select(of_run.health[FAILED_ATTEMPTS]).where(of_run.id == run)
    return fires, failed.scalar_subquery(), failing.scalar_subquery()


_RUN: BindParameter[Any] = bindparam("of_run")


def _first_waiting(run: ColumnElement[Any], *columns: Any) -> Select[Any]:
    return select(*columns).where(*_waits(run)).order_by(Segment.seq, Segment.id).limit(MOST_ENTRIES)


_SEGMENTS = _first_waiting(_RUN, *_OF_SEGMENT)
_ATTEMPTS = select(*_OF_ATTEMPT).where(Attempt.run_id == _RUN)
_TROUBLES = _troubles(_RUN)
_EACH = RunRow.id.expression
_FIRST = _first_waiting(_EACH, func.json_build_array(*_OF_SEGMENT).label("entry")).correlate(RunRow).lateral()
_AT_ONCE = select(
    RunRow.id,
    select(func.json_agg(_FIRST.c.entry)).scalar_subquery(),
    select(func.json_agg(func.json_build_array(*_OF_ATTEMPT)))
    .where(Attempt.run_id == _EACH)
    .scalar_subquery(),
    *_troubles(_EACH),
).where(RunRow.id == any_(bindparam("of_runs", type_=ARRAY(BigInteger()))))


@dataclass(frozen=True)
class InboxEntry:
    """An unread segment: the id of its row, its key, when it was found, and its trace."""

    row_id: int
    key: SegmentKey
    found_ns: int
    traceparent: str = ""


@dataclass(frozen=True)
class Gap:
    """Missing segments of a writer: sequence numbers ``start`` to ``until - 1``."""

    writer: WriterId
    start: int
    until: int
    since_ns: int


@dataclass(frozen=True)
class Plan:
    """Which segments to read.

    Attributes:
        readable: segments in journal order.
        waiting: gaps that block the segments after them.
        trailing: gaps at the end of an ended writer that have timed out.
    """

    readable: tuple[InboxEntry, ...]
    waiting: tuple[Gap, ...]
    trailing: tuple[Gap, ...]


@dataclass(frozen=True)
class GapTimeout:
    """When a gap times out.

    Attributes:
        now_ns: time by the database's clock.
        gap_ns: the timeout.
        listed: the store was listed in this evaluation, so a segment that is not in the inbox does not exist.
        ends_known: the inbox has all entries, so that the last ones of each writer are known.
    """

    now_ns: int
    gap_ns: int
    listed: bool
    ends_known: bool = True

    def over(self, gap: Gap) -> bool:
        """Whether a gap has timed out."""
        waited = self.now_ns - gap.since_ns
        # A gap found more than the timeout in the future was found before the clock was set back, an unknown time ago.
        return self.listed and not -self.gap_ns <= waited < self.gap_ns


def make_plan(
    cursor: dict[WriterId, int],
    entries: list[InboxEntry],
    ends: dict[str, dict[str, Any]],
    timeout: GapTimeout,
) -> Plan:
    """Plan which segments of the inbox to read.

    Args:
        cursor: next sequence number of each writer.
        entries: announced segments that have not been read.
        ends: attempt → rank → its end document.
        timeout: when gaps time out.
    """
    ordered: list[tuple[int, InboxEntry]] = []
    waiting: list[Gap] = []
    reached = dict(cursor)
    blocked: set[WriterId] = set()
    delayed_until: dict[WriterId, int] = {}
    for entry in sorted(entries, key=lambda entry: entry.key):
        writer, seq = entry.key.writer, entry.key.seq
        following = reached.get(writer, 0)
        if writer in blocked:
            continue
        if seq > following:
            gap = Gap(writer, following, seq, entry.found_ns)
            # A writer stores its segments in order, so the first ones of a new writer were deleted with an earlier run of this name.
            is_deleted = timeout.listed and writer not in reached
            if not (is_deleted or timeout.over(gap)):
                waiting.append(gap)
                blocked.add(writer)
                continue
        reached[writer] = max(following, seq + 1)
        # A segment follows its writer's earlier ones, even if it was found before them.
        delayed_until[writer] = max(delayed_until.get(writer, 0), entry.found_ns)
        ordered.append((delayed_until[writer], entry))
    trailing = _trailing(reached, ends) if timeout.ends_known else []
    open_ends = [gap for gap in trailing if gap.writer not in blocked]
    readable = sorted(ordered, key=lambda pair: (pair[0], pair[1].key))
    return Plan(
        tuple(entry for _, entry in readable),
        (*waiting, *(gap for gap in open_ends if not timeout.over(gap))),
        tuple(gap for gap in open_ends if timeout.over(gap)),
    )


def _trailing(reached: dict[WriterId, int], ends: dict[str, dict[str, Any]]) -> list[Gap]:
    """Gaps at the end of ended writers. If a writer wrote for several ranks, the largest segment count is expected."""
    gaps: dict[WriterId, Gap] = {}
    by_name = _by_name(reached)
    for attempt, ranks in ends.items():
        for end in ranks.values():
            for writer in by_name.get((attempt, end["writer"]), ()):
                following = reached[writer]
                expected = gaps[writer].until if writer in gaps else following
                if end["segments"] > expected:
                    gaps[writer] = Gap(writer, following, int(end["segments"]), int(end["found_ns"]))
    return list(gaps.values())


def _by_name(writers: Iterable[WriterId]) -> dict[tuple[str, str], list[WriterId]]:
    """Writers by their name in end documents: attempt and writer id, without the node."""
    by_name: dict[tuple[str, str], list[WriterId]] = {}
    for writer in writers:
        by_name.setdefault((writer.attempt, writer.writer), []).append(writer)
    return by_name


def ended_ranks(
    cursor: dict[WriterId, int], attempt: str, ends: dict[str, Any], until_ns: int
) -> frozenset[int]:
    """Ranks that have ended and have no segment left to read.

    Args:
        cursor: next sequence number of each writer.
        attempt: name of the attempt.
        ends: rank → its end document.
        until_ns: ends found before this time no longer wait for a writer without segments.
    """
    ended = set()
    by_name = _by_name(cursor)
    for rank, end in ends.items():
        following = [cursor[writer] for writer in by_name.get((attempt, end["writer"]), ())]
        read = any(seq >= end["segments"] for seq in following)
        if end["segments"] == 0 or read or (not following and end["found_ns"] <= until_ns):
            ended.add(int(rank))
    return frozenset(ended)


def decode(text: str) -> dict[WriterId, int]:
    """Decode a cursor."""
    return {WriterId(*key.split("/")): int(seq) for key, seq in json.loads(text).items()}


def encode(cursor: dict[WriterId, int]) -> str:
    """Encode a cursor; equal cursors have equal texts."""
    named = {f"{writer.attempt}/{writer.node}/{writer.writer}": seq for writer, seq in cursor.items()}
    return json.dumps(named, sort_keys=True, separators=(",", ":"))
