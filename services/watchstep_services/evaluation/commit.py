"""Commit, the third phase of an evaluation: write all results in one short transaction, or none of them.

Every commit begins with the same write, `_write_progress`: the fence, the cursor, the segments that were read, the attempt, the journal
and the rule states. Most evaluations write nothing else. On PostgreSQL that write is one statement and a transaction by itself, for one
run or for all runs of a batch: each further statement costs a worker a third of a millisecond, and PostgreSQL as much. On SQLite it is one
statement for each table, and a batch is one transaction. Each run has its own fence, so a run that was lost to another worker
keeps no other from being written. Other results follow in the same transaction: findings, which are serialized before it, and, in `_write_news`, alerts,
a run's start, rule health, corrupt and missing segments.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Connection,
    Dialect,
    Insert,
    Text,
    TextClause,
    bindparam,
    case,
    cast,
    func,
    insert,
    or_,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, defer

from watchstep_rules.engine.rule_inputs import MOST_LOOKBACK_ROWS
from watchstep_services.core.failpoints import failpoint
from watchstep_services.db.clock import clock_expression, now_ns
from watchstep_services.db.engine import insert_missing, is_of_all
from watchstep_services.db.lease import RUN_LEASE
from watchstep_services.db.models import (
    Attempt,
    FindingRow,
    RuleConfigRow,
    RuleStateRow,
    RunRow,
    Segment,
    TickRow,
    WatermarkRow,
)
from watchstep_services.evaluation.alerting import publish
from watchstep_services.evaluation.collect import Collected, spans_of_ranks
from watchstep_services.evaluation.inbox import FAILED_ATTEMPTS, Gap
from watchstep_services.evaluation.unfinished_reads import unfinished_after
from watchstep_services.evaluation.watermark import AttemptProgress, WatermarkAdvance, ranks_as_data
from watchstep_services.runs.claim import Claim, EventContext
from watchstep_services.runs.lifecycle import start_run
from watchstep_services.runs.rule_health import has_news as has_health_news
from watchstep_services.runs.rule_health import report_health
from watchstep_services.service.context import Service
from watchstep_services.service.judging import FINDINGS_KEPT, Judged, LostContext, stored_findings

_log = logging.getLogger(__name__)

_MISSING_ROWS = 1000
"""Rows of missing segments that one evaluation writes; the rest are counted. Listings find late segments without rows, too."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """The results of an evaluation.

    Attributes:
        collected: the segments.
        cursor: canonical text of the cursor after them.
        progress: progress of the attempt before the watermark advances.
        advance: the advance of the watermark, if any.
        context: journal positions within the next evaluation's lookback.
        judged: results of the rules.
        ended: no row arrived and the attempt has ended, so its silence was not evaluated.
        lost: earlier rows that could not be read; None if all were read.
        limited: whether fewer earlier rows are kept than the rules look back on.
        due_ns: when the next evaluation is due without a hint.
    """

    collected: Collected
    cursor: str
    progress: AttemptProgress
    advance: WatermarkAdvance | None
    context: list[int]
    judged: list[Judged]
    ended: bool
    lost: LostContext | None
    limited: bool
    due_ns: int | None

    @property
    def watermark(self) -> int:
        """The watermark after this evaluation."""
        return self.advance.step if self.advance else self.progress.watermark


@dataclass(frozen=True)
class Committed:
    """The result of a commit.

    Attributes:
        actions: ids of the actions that it caused.
        hinted: a hint arrived while the run was claimed. Its message may have found the run claimed, so the run is due again.
        reported_health: the last reported health, by rule config.
    """

    actions: list[int]
    hinted: bool
    reported_health: dict[int, str | None]


def commit(service: Service, claim: Claim, outcome: EvaluationOutcome) -> Committed | None:
    """Write an outcome if the claim is current.

    Returns:
        The result; None, and nothing is written, if another worker has claimed the run or moved its cursor.
    """
    if not has_news(claim, outcome):
        failpoint("evaluate.writing", claim)
        with service.database.bare() as connection:
            rows = _write_progress(connection, [(claim, outcome)], service.worker)
        row = rows.get(claim.run_id)
        return None if row is None else _without_news(claim, outcome, row)
    findings = _finding_rows(service, outcome)
    with service.database.write() as session:
        row = _write_progress(session.connection(), [(claim, outcome)], service.worker).get(claim.run_id)
        if row is None:
            session.rollback()
            return None
        if findings:
            session.connection().execute(_add_findings(session.connection().dialect.name), findings)
        actions, reported = _write_news(service, session, claim, outcome, row)
        failpoint("evaluate.writing", claim)
        return Committed(actions, row.hints != claim.hints, reported)


def commit_all(service: Service, outcomes: Sequence[tuple[Claim, EvaluationOutcome]]) -> dict[int, Committed]:
    """Write outcomes of different runs without news, with one statement on PostgreSQL and in one transaction on SQLite.

    Returns:
        Results by run id. Runs that are left out have to be committed one by one: their claims are not current, another transaction
        has locked their rows, or an outcome cannot be stored.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    try:
        for claim, _ in outcomes:
            failpoint("evaluate.writing", claim)
        with service.database.bare() as connection:
            rows = _write_progress(connection, outcomes, service.worker, skip_locked=True)
    except SQLAlchemyError as error:
        if is_of_all(error):
            raise
        _log.warning("a batch of %d evaluations is committed one by one: %s", len(outcomes), error)
        return {}
    return {
        claim.run_id: _without_news(claim, outcome, rows[claim.run_id])
        for claim, outcome in outcomes
        if claim.run_id in rows
    }


def _without_news(claim: Claim, outcome: EvaluationOutcome, row: _RunAtCommit) -> Committed:
    reported = {judged.row.id: judged.reported_health for judged in outcome.judged}
    return Committed([], row.hints != claim.hints, reported)


def has_news(claim: Claim, outcome: EvaluationOutcome) -> bool:
    """Whether there is anything to write besides the progress."""
    collected = outcome.collected
    if not collected.calm or collected.corrupt or collected.missing or collected.failed:
        return True
    if (
        outcome.lost is not None
        or outcome.limited
        or (claim.state, claim.state_attempt) != ("running", collected.attempt)
    ):
        return True
    return any(
        judged.reported_health is None
        or judged.findings
        or judged.transitions
        or has_health_news(judged.config, judged.memory, judged.reported_health, outcome.watermark)
        for judged in outcome.judged
    )


@dataclass(frozen=True)
class _RunAtCommit:
    """Columns of the run's row after its cursor was moved."""

    hints: int
    now_ns: int
    health: dict[str, Any]
    state: str
    state_attempt: str


def _write_progress(
    connection: Connection,
    outcomes: Sequence[tuple[Claim, EvaluationOutcome]],
    worker: str,
    *,
    skip_locked: bool = False,
) -> dict[int, _RunAtCommit]:
    """Move the cursors of runs and write what every evaluation writes.

    PostgreSQL executes one statement, SQLite one for each table and run.

    Args:
        connection: the connection.
        outcomes: the outcomes of different runs.
        worker: name of this worker.
        skip_locked: leave out runs with rows that another transaction has locked, instead of waiting for it.

    Returns:
        The columns of each run. A run is left out, and nothing of it is written, if its claim is not current.
    """
    if connection.dialect.name != "postgresql":
        rows = {claim.run_id: _write_one(connection, claim, outcome, worker) for claim, outcome in outcomes}
        return {run_id: _RunAtCommit(*row) for run_id, row in rows.items() if row is not None}
    runs = [
        {
            **_progress_values(claim, outcome, worker),
            "segments": _segments_read(claim, outcome.collected),
            "states": [
                {"config_id": judged.row.id, "state": judged.state}
                for judged in outcome.judged
                if judged.changed
            ],
        }
        for claim, outcome in outcomes
    ]
    statement = _at_once(connection.dialect, skip_locked=skip_locked)
    found = connection.execute(statement, {"runs": json.dumps(runs)}).all()
    return {run_id: _RunAtCommit(*row) for run_id, *row in found}


def _write_one(connection: Connection, claim: Claim, outcome: EvaluationOutcome, worker: str) -> Any:
    values = _progress_values(claim, outcome, worker)
    row = connection.execute(_MOVE, {name: values[name] for name in _MOVE_NAMES}).one_or_none()
    if row is not None:
        states = [(judged.row.id, judged.state) for judged in outcome.judged if judged.changed]
        _write_tables(connection, values, _segments_read(claim, outcome.collected), states)
    return row


def _write_tables(
    connection: Connection,
    values: dict[str, Any],
    segments: list[dict[str, Any]],
    states: list[tuple[int, str]],
) -> None:
    """Write the tables other than the run's, one statement each."""
    if segments:
        connection.execute(_SEGMENT, segments)
    of_attempt = {"of_run": values["run_id"], "named": values["attempt"]}
    connection.execute(_ATTEMPT, {**of_attempt, **{name: values[name] for name in _ATTEMPT_NAMES}})
    named = {name: values[name] for name in ("run_id", "tick", "attempt", "at_ns")}
    connection.execute(_TICK, {**named, "position": values["journal"], "ended": values["ended"]})
    if values["cause"] is not None:
        connection.execute(_WATERMARK, {**named, "step": values["watermark"], "cause": values["cause"]})
    if states:
        attempt = values["attempt"]
        rows = [{"of": config_id, "on": attempt, "new_state": state} for config_id, state in states]
        connection.execute(_STATE, rows)


def _progress_values(claim: Claim, outcome: EvaluationOutcome, worker: str) -> dict[str, Any]:
    collected, progress, advance = outcome.collected, outcome.progress, outcome.advance
    return {
        "lease_key": claim.run_id,
        "lease_token": claim.epoch,
        "read_cursor": claim.cursor,
        "cursor": outcome.cursor,
        "journal": claim.journal + len(collected.blocks),
        "ticks": claim.tick + 1,
        "unfinished": unfinished_after(claim, more=collected.more),
        "last": max((entry.key.last for entry, _ in collected.blocks), default=-1),
        "cached_by": worker,
        "known_hints": claim.hints,
        "due": outcome.due_ns,
        "more": collected.more,
        "run_id": claim.run_id,
        "attempt": collected.attempt,
        "ranks": ranks_as_data(progress.ranks),
        "first_seen_ns": progress.first_seen_ns,
        "largest": progress.largest,
        "watermark": outcome.watermark,
        "context": outcome.context,
        "tick": claim.tick,
        "at_ns": claim.now_ns,
        "ended": outcome.ended,
        "cause": advance.cause if advance else None,
    }


# These statements are built once and executed without the ORM session, because building them and the session's
# flush cost more than the writes.
_RUN = RunRow.__table__.c
_HINTED = _RUN.hints != bindparam("known_hints")
_MOVE = (
    RUN_LEASE.writing.where(_RUN.cursor == bindparam("read_cursor"))
    .values(
        cursor=bindparam("cursor"),
        journal=bindparam("journal"),
        ticks=bindparam("ticks"),
        lease_until_ns=0,
        unfinished_claims=bindparam("unfinished"),
        reading="",
        last_step=case(
            (_RUN.last_step < bindparam("last", type_=BigInteger()), bindparam("last", type_=BigInteger())),
            else_=_RUN.last_step,
        ),
        evaluated_ns=case((_RUN.journal < bindparam("journal"), now_ns()), else_=_RUN.evaluated_ns),
        cached_by=bindparam("cached_by"),
        due_ns=case((_HINTED, now_ns()), else_=bindparam("due", type_=BigInteger())),
        # If more is to be read, or a hint arrived meanwhile, the worker that releases the run sends the next message.
        requested_ns=case(
            (or_(_HINTED, bindparam("more", type_=Boolean())), now_ns()), else_=_RUN.requested_ns
        ),
    )
    .returning(_RUN.hints, now_ns(), _RUN.health, _RUN.state, _RUN.state_attempt)
)
_MOVE_NAMES = (
    "lease_key", "lease_token", "read_cursor", "cursor", "journal", "ticks", "unfinished", "last", "cached_by", "known_hints", "due", "more",
)  # fmt: skip
_SEGMENT = (
    update(Segment.__table__)  # type: ignore[arg-type]
    .where(Segment.__table__.c.id == bindparam("row_id"))
    .values(state="read", position=bindparam("position"), ranks=bindparam("ranks"))
)
_ATTEMPT_NAMES = ("ranks", "first_seen_ns", "largest", "ticks", "watermark", "context")
_ATTEMPT = (
    update(Attempt.__table__)  # type: ignore[arg-type]
    .where(
        Attempt.__table__.c.run_id == bindparam("of_run"),
        Attempt.__table__.c.attempt == bindparam("named"),
    )
    .values({name: bindparam(name) for name in _ATTEMPT_NAMES})
)
_TICK, _WATERMARK = insert(TickRow.__table__), insert(WatermarkRow.__table__)  # type: ignore[arg-type]
_STATES = RuleStateRow.__table__.c
_STATE = (
    update(RuleStateRow.__table__)  # type: ignore[arg-type]
    .where(_STATES.config_id == bindparam("of"), _STATES.attempt == bindparam("on"))
    .values(state=bindparam("new_state"))
)


@functools.lru_cache(maxsize=16)
def _at_once(dialect: Dialect, *, skip_locked: bool) -> TextClause:
    statement = _AT_ONCE.replace("{now}", clock_expression(dialect))
    return text(statement.replace("{unlocked}", _UNLOCKED if skip_locked else ""))


# A statement for several runs waits for no other transaction: a row that hangs in one would keep the others.
_UNLOCKED = """
    JOIN LATERAL (
        SELECT id FROM runs AS free WHERE free.id = given.lease_key FOR UPDATE SKIP LOCKED
    ) AS unlocked ON true
"""
# Every clause after ``moved`` reads from it, so that nothing of a run is written if its claim is not current. The fence equals
# that of `RUN_LEASE.writing`.
_AT_ONCE = """
WITH given AS MATERIALIZED (
    SELECT given.* FROM json_to_recordset(CAST(:runs AS json)) AS given (
        lease_key bigint, lease_token bigint, read_cursor text, cursor text, journal bigint, ticks bigint, unfinished bigint,
        last bigint, cached_by varchar, known_hints bigint, due bigint, more boolean, attempt varchar, ranks json,
        first_seen_ns bigint, largest bigint, watermark bigint, context json, tick bigint, at_ns bigint, ended boolean,
        cause varchar, segments json, states json
    ) {unlocked}
), moved AS (
    UPDATE runs SET
        cursor = given.cursor, journal = given.journal, ticks = given.ticks, lease_until_ns = 0, cached_by = given.cached_by,
        unfinished_claims = given.unfinished, reading = '',
        last_step = greatest(runs.last_step, given.last),
        evaluated_ns = CASE WHEN runs.journal < given.journal THEN {now} ELSE runs.evaluated_ns END,
        due_ns = CASE WHEN hints <> given.known_hints THEN {now} ELSE given.due END,
        requested_ns = CASE WHEN hints <> given.known_hints OR given.more THEN {now} ELSE requested_ns END
    FROM given
    WHERE runs.id = given.lease_key AND runs.epoch = given.lease_token AND runs.cursor = given.read_cursor
    RETURNING runs.id, runs.hints, {now} AS now_ns, runs.health, runs.state, runs.state_attempt, given.attempt, given.segments,
        given.states, given.ranks, given.first_seen_ns, given.largest, given.ticks, given.watermark, given.context, given.tick,
        given.journal, given.at_ns, given.ended, given.cause
), read_segments AS (
    UPDATE segments SET state = 'read', position = new_rows.position, ranks = new_rows.ranks
    FROM moved, json_to_recordset(moved.segments) AS new_rows (row_id bigint, position bigint, ranks json)
    WHERE segments.id = new_rows.row_id
), moved_attempt AS (
    UPDATE attempts SET
        ranks = moved.ranks, first_seen_ns = moved.first_seen_ns, largest = moved.largest, ticks = moved.ticks,
        watermark = moved.watermark, context = moved.context
    FROM moved WHERE attempts.run_id = moved.id AND attempts.attempt = moved.attempt
), added_tick AS (
    INSERT INTO ticks (run_id, tick, attempt, position, at_ns, ended)
    SELECT moved.id, moved.tick, moved.attempt, moved.journal, moved.at_ns, moved.ended FROM moved
), added_watermark AS (
    INSERT INTO watermarks (run_id, tick, attempt, step, cause, at_ns)
    SELECT moved.id, moved.tick, moved.attempt, moved.watermark, moved.cause, moved.at_ns
    FROM moved WHERE moved.cause IS NOT NULL
), moved_states AS (
    UPDATE rule_states SET state = new_rows.state
    FROM moved, json_to_recordset(moved.states) AS new_rows (config_id bigint, state text)
    WHERE rule_states.config_id = new_rows.config_id AND rule_states.attempt = moved.attempt
)
SELECT id, hints, now_ns, health, state, state_attempt FROM moved
"""


def _write_news(
    service: Service, session: Session, claim: Claim, outcome: EvaluationOutcome, run: _RunAtCommit
) -> tuple[list[int], dict[int, str | None]]:
    """Write results other than progress; return the ids of new actions, and the last reported health by rule config."""
    attempt = outcome.collected.attempt
    _write_troubles(session, claim, outcome, run)
    if (run.state, run.state_attempt) != ("running", attempt):
        start_run(
            service, session, claim.run_id, run.now_ns
        )  # before the events of rules, because events are read in this order
    context = EventContext.of(service.base_url, claim, attempt, run.now_ns, service.links)
    states = _rule_states(session, claim.run_id, outcome)
    reported: dict[int, str | None] = {}
    for judged in outcome.judged:
        state = states.get(judged.row.id) or _add_state(session, attempt, judged)
        state.findings += judged.finding_count
        report_health(session, context, judged, state, outcome.watermark)
        reported[judged.row.id] = state.reported_health
    return publish(service, session, context, outcome.judged, outcome.watermark), reported


def _write_troubles(session: Session, claim: Claim, outcome: EvaluationOutcome, run: _RunAtCommit) -> None:
    """Write corrupt and missing segments and the run's health."""
    collected, before = outcome.collected, run.health
    for entry, problem in collected.corrupt:
        session.execute(
            update(Segment).where(Segment.id == entry.row_id).values(state="corrupt", problem=problem[:2000])
        )
    missing, room = 0, _MISSING_ROWS
    for gap in collected.missing:
        missing += gap.until - gap.start
        room -= _mark_missing(session, claim.run_id, gap, run.now_ns, room)
    health = {key: value for key, value in before.items() if key not in {"evaluation", FAILED_ATTEMPTS}}
    failed = {**before.get(FAILED_ATTEMPTS, {}), collected.attempt: "", **collected.failed}
    if any(failed.values()):
        health[FAILED_ATTEMPTS] = {name: problem[:500] for name, problem in failed.items() if problem}
    if missing:
        health["missing_segments"] = int(health.get("missing_segments", 0)) + missing
    if collected.corrupt:
        health["corrupt_segments"] = int(health.get("corrupt_segments", 0)) + len(collected.corrupt)
        health["last_corrupt"] = collected.corrupt[-1][1][:500]
    if outcome.lost is not None:
        health["lost_context"] = int(health.get("lost_context", 0)) + outcome.lost.segments
        health["last_lost_context"] = outcome.lost.problem[:500]
    if outcome.limited:
        health["lookback"] = f"limited to {MOST_LOOKBACK_ROWS} rows: rules look back on fewer steps"
    if health != before:
        session.execute(
            update(RunRow)
            .where(RunRow.id == claim.run_id)
            .values(health=health)
            .execution_options(synchronize_session=False)
        )


def _segments_read(claim: Claim, collected: Collected) -> list[dict[str, Any]]:
    """The row, journal position and ranks of each segment that was read."""
    return [
        {"row_id": entry.row_id, "position": claim.journal + position, "ranks": spans_of_ranks(block)}
        for position, (entry, block) in enumerate(collected.blocks)
    ]


def _mark_missing(session: Session, run_id: int, gap: Gap, now: int, most: int) -> int:
    """Record missing segments, so that they are read if they arrive later; return the number of rows."""
    who, until = gap.writer, min(gap.until, gap.start + most)
    for seq in range(gap.start, until):
        values = {
            "run_id": run_id, "attempt": who.attempt, "node": who.node, "writer": who.writer, "seq": seq,
            "first": -1, "last": -1, "state": "missing", "found_ns": now, "problem": "waited for until the deadline",
        }  # fmt: skip
        insert_missing(session, Segment, values)
    return until - gap.start


def _rule_states(session: Session, run_id: int, outcome: EvaluationOutcome) -> dict[int, RuleStateRow]:
    """Rows of the attempt's rule states, by rule config."""
    named = {"of_run": run_id, "named": outcome.collected.attempt}
    return {row.config_id: row for row in session.execute(_RULE_STATES, named).scalars()}


_RULE_STATES = (
    select(RuleStateRow)
    .where(
        RuleStateRow.attempt == bindparam("named"),
        RuleStateRow.config_id.in_(
            select(RuleConfigRow.id).where(RuleConfigRow.run_id == bindparam("of_run"))
        ),
    )
    .options(defer(RuleStateRow.state))  # `_write_progress` has written it
)


def _add_state(session: Session, attempt: str, judged: Judged) -> RuleStateRow:
    state = RuleStateRow(
        config_id=judged.row.id, attempt=attempt, state=judged.state, findings=0, reported_health=""
    )
    session.add(state)
    return state


def _finding_rows(service: Service, outcome: EvaluationOutcome) -> list[dict[str, Any]]:
    """The rows of the new findings that are stored.

    They are built and serialized before the write transaction, because on SQLite all other projects wait for it. The count of earlier
    findings that is read here is current if the fence is: only the claim's owner writes findings of the run.
    """
    found = [judged for judged in outcome.judged if judged.findings]
    if not found:
        return []
    attempt = outcome.collected.attempt
    of_configs = {"of_configs": [judged.row.id for judged in found], "named": attempt}
    with service.database.read() as session:
        earlier = dict(session.execute(_EARLIER_FINDINGS, of_configs).all())
    room = [max(0, FINDINGS_KEPT - earlier.get(judged.row.id, 0)) for judged in found]
    return [
        {"config_id": row.id, "attempt": attempt, "step": finding.step, "finding_text": serialized}
        for row, finding, serialized in stored_findings(found, room)
    ]


_EARLIER_FINDINGS = (
    select(FindingRow.config_id, func.count())
    .where(
        FindingRow.config_id.in_(bindparam("of_configs", expanding=True)),
        FindingRow.attempt == bindparam("named"),
    )
    .group_by(FindingRow.config_id)
)


@functools.lru_cache(maxsize=2)
def _add_findings(dialect: str) -> Insert:
    # The column's type would serialize the text again. PostgreSQL converts text to JSON only with a cast, which is a number on SQLite.
    finding = bindparam("finding_text", type_=Text())
    serialized = cast(finding, JSON) if dialect == "postgresql" else type_coerce(finding, Text)
    return insert(FindingRow.__table__).values(finding=serialized)  # type: ignore[arg-type]
