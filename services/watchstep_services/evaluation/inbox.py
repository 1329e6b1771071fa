"""What waits of a run when it is claimed: its segments, attempts and cursor, and which segments to read in which order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, exists, func, select

from watchstep.format.layout import SegmentKey, WriterId
from watchstep_rules.engine.alert import Phase
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertInstanceRow, Attempt, RunRow, Segment

FAILED_ATTEMPTS = "failed_attempts"
"""In a run's health: attempt → why its last evaluation failed."""


@dataclass(frozen=True)
class Inbox:
    """What there is of a run.

    Attributes:
        entries: segments that were announced and not read.
        attempts: rows of its attempts, by name; not to be written.
        calm: no alert of it fires, and its last evaluation did not fail.
        failing: attempts whose last evaluation failed; they come after the others.
    """

    entries: list[InboxEntry]
    attempts: dict[str, Attempt]
    calm: bool
    failing: frozenset[str] = frozenset()


def open_inbox(database: Database, run_id: int) -> Inbox:
    """Ask for all of it: on PostgreSQL at once."""
    of = {"of_run": run_id}
    with database.bare() as connection:
        if connection.dialect.name == "sqlite":
            return _one_by_one(connection, of)
        segments, attempts, *troubles = connection.execute(_AT_ONCE, of).one()
    return _opened(segments or (), attempts or (), *troubles)


def _one_by_one(connection: Connection, of: dict[str, Any]) -> Inbox:
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


# Made once: every evaluation asks it.
_OF_SEGMENT = (
    Segment.id, Segment.attempt, Segment.node, Segment.writer, Segment.seq, Segment.first, Segment.last,
    Segment.found_ns, Segment.traceparent,
)  # fmt: skip
_NAMES = [column.key for column in Attempt.__table__.columns]
_OF_ATTEMPT = [getattr(Attempt, name) for name in _NAMES]
_RUN: BindParameter[Any] = bindparam("of_run")
_WAITS = (Segment.run_id == _RUN, Segment.state == "announced")
_SEGMENTS = select(*_OF_SEGMENT).where(*_WAITS)
_ATTEMPTS = select(*_OF_ATTEMPT).where(Attempt.run_id == _RUN)
_FIRES = exists().where(AlertInstanceRow.run_id == _RUN, AlertInstanceRow.phase == Phase.FIRING.value)
_FAILED = (
    select(RunRow.health["evaluation"].as_string().is_not(None)).where(RunRow.id == _RUN).scalar_subquery()
)
_FAILING = select(RunRow.health[FAILED_ATTEMPTS]).where(RunRow.id == _RUN).scalar_subquery()
_TROUBLES = (_FIRES, _FAILED, _FAILING)
_AT_ONCE = select(
    select(func.json_agg(func.json_build_array(*_OF_SEGMENT))).where(*_WAITS).scalar_subquery(),
    select(func.json_agg(func.json_build_array(*_OF_ATTEMPT)))
    .where(Attempt.run_id == _RUN)
    .scalar_subquery(),
    *_TROUBLES,
)


@dataclass(frozen=True)
class InboxEntry:
    """A segment of the inbox that was not read: its row, its key, when it was found, and the trace that it belongs to."""

    row_id: int
    key: SegmentKey
    found_ns: int
    traceparent: str = ""


@dataclass(frozen=True)
class Gap:
    """Segments that should be there and are not: sequence numbers start … until - 1 of a writer."""

    writer: WriterId
    start: int
    until: int
    since_ns: int


@dataclass(frozen=True)
class Plan:
    """What to read.

    Attributes:
        readable: in the order in which they will stand in the journal.
        waiting: gaps that hold up what is behind them.
        trailing: gaps at the end of a writer that has ended, given up.
    """

    readable: tuple[InboxEntry, ...]
    waiting: tuple[Gap, ...]
    trailing: tuple[Gap, ...]


@dataclass(frozen=True)
class GapPatience:
    """How long gaps are waited for.

    Attributes:
        now_ns: by the database's clock.
        gap_ns: how long.
        listed: the store has been listed in this evaluation: what is not in the inbox does not exist.
    """

    now_ns: int
    gap_ns: int
    listed: bool

    def over(self, gap: Gap) -> bool:
        """Whether a gap is given up."""
        waited = self.now_ns - gap.since_ns
        # Beyond the patience ahead it was found before the clock was set back, and nobody knows how long ago that is.
        return self.listed and not -self.gap_ns <= waited < self.gap_ns


def make_plan(
    cursor: dict[WriterId, int],
    entries: list[InboxEntry],
    ends: dict[str, dict[str, Any]],
    patience: GapPatience,
) -> Plan:
    """Sort the inbox.

    Args:
        cursor: next sequence number of each writer.
        entries: all that was announced and not read.
        ends: attempt → rank → what its end document said.
        patience: how long gaps are waited for.
    """
    ordered: list[tuple[int, InboxEntry]] = []
    waiting: list[Gap] = []
    reached = dict(cursor)
    blocked: set[WriterId] = set()
    held_up: dict[WriterId, int] = {}
    for entry in sorted(entries, key=lambda entry: entry.key):
        writer, seq = entry.key.writer, entry.key.seq
        following = reached.get(writer, 0)
        if writer in blocked:
            continue
        if seq > following:
            gap = Gap(writer, following, seq, entry.found_ns)
            if not patience.over(gap):
                waiting.append(gap)
                blocked.add(writer)
                continue
        reached[writer] = max(following, seq + 1)
        # A segment stands behind its writer's earlier ones, even where it was found before them.
        held_up[writer] = max(held_up.get(writer, 0), entry.found_ns)
        ordered.append((held_up[writer], entry))
    open_ends = [gap for gap in _trailing(reached, ends) if gap.writer not in blocked]
    readable = sorted(ordered, key=lambda pair: (pair[0], pair[1].key))
    return Plan(
        tuple(entry for _, entry in readable),
        (*waiting, *(gap for gap in open_ends if not patience.over(gap))),
        tuple(gap for gap in open_ends if patience.over(gap)),
    )


def _trailing(reached: dict[WriterId, int], ends: dict[str, dict[str, Any]]) -> list[Gap]:
    """Of several ranks that one writer wrote for, the one whose rows reach furthest says how much must be there."""
    gaps: dict[WriterId, Gap] = {}
    named = _by_name(reached)
    for attempt, ranks in ends.items():
        for end in ranks.values():
            for writer in named.get((attempt, end["writer"]), ()):
                following = reached[writer]
                known = gaps[writer].until if writer in gaps else following
                if end["segments"] > known:
                    gaps[writer] = Gap(writer, following, int(end["segments"]), int(end["found_ns"]))
    return list(gaps.values())


def _by_name(writers: Iterable[WriterId]) -> dict[tuple[str, str], list[WriterId]]:
    """Writers by what an end document names them by: its attempt, and the writer's id whatever its node."""
    named: dict[tuple[str, str], list[WriterId]] = {}
    for writer in writers:
        named.setdefault((writer.attempt, writer.writer), []).append(writer)
    return named


def ended_ranks(
    cursor: dict[WriterId, int], attempt: str, ends: dict[str, Any], until_ns: int
) -> frozenset[int]:
    """Ranks that ended and whose segments have all been read or given up.

    Args:
        cursor: next sequence number of each writer.
        attempt: whose.
        ends: rank → what its end document said.
        until_ns: ends found before this no longer wait for a writer that was never heard of.
    """
    ended = set()
    named = _by_name(cursor)
    for rank, end in ends.items():
        heard = [cursor[writer] for writer in named.get((attempt, end["writer"]), ())]
        read = any(following >= end["segments"] for following in heard)
        if end["segments"] == 0 or read or (not heard and end["found_ns"] <= until_ns):
            ended.add(int(rank))
    return frozenset(ended)


def decode(text: str) -> dict[WriterId, int]:
    """Read a cursor."""
    return {WriterId(*key.split("/")): int(seq) for key, seq in json.loads(text).items()}


def encode(cursor: dict[WriterId, int]) -> str:
    """The one text of a cursor: equal cursors have equal texts."""
    named = {f"{who.attempt}/{who.node}/{who.writer}": seq for who, seq in cursor.items()}
    return json.dumps(named, sort_keys=True, separators=(",", ":"))
