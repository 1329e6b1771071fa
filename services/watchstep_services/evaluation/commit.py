"""Commit, the third phase of an evaluation: all of its results in one short transaction, or none of them.

In most evaluations nothing happens: rows came, and every rule went on as it did. On PostgreSQL the fence and all that such an
evaluation writes are one statement, which is a transaction by itself: each further statement costs a worker a third of a
millisecond, and PostgreSQL as much. Other evaluations, and all on SQLite, are written in steps.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Dialect,
    TextClause,
    bindparam,
    case,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session, defer

from watchstep_services.core.failpoints import failpoint
from watchstep_services.db.clock import clock_expression, now_ns
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
from watchstep_services.db.upsert import insert_missing
from watchstep_services.evaluation.alerting import publish
from watchstep_services.evaluation.collect import Collected, spans_of_ranks
from watchstep_services.evaluation.inbox import FAILED_ATTEMPTS
from watchstep_services.evaluation.plan import Gap
from watchstep_services.evaluation.seals import AttemptProgress, SealDecision, writers_as_data
from watchstep_services.evaluation.unfinished_reads import unfinished_after
from watchstep_services.runs.claim import Claim, EventContext
from watchstep_services.runs.lifecycle import start_run
from watchstep_services.runs.rule_health import has_news, tell_health
from watchstep_services.service.context import Service
from watchstep_services.service.judging import FINDINGS_KEPT, Judged, LostContext

if TYPE_CHECKING:
    from watchstep_services.runs.claim import Claim


_TABLE = RuleStateRow.__table__
_EACH = (
    update(_TABLE)  # type: ignore[arg-type]
    .where(_TABLE.c.config_id == bindparam("of"), _TABLE.c.attempt == bindparam("on"))
    .values(memory=bindparam("kept"))
)
# One statement instead of one for each rule.
_ALL = text(
    "UPDATE rule_memories SET memory = given.memory"
    " FROM unnest(CAST(:of AS bigint[]), CAST(:kept AS text[])) AS given (config_id, memory)"
    " WHERE rule_memories.config_id = given.config_id AND rule_memories.attempt = :on"
)


def write_memories(session: Session, attempt: str, kept: dict[int, str]) -> None:
    """Write over what rule configs remembered of an attempt; they have rows there.

    Args:
        session: the transaction.
        attempt: the attempt.
        kept: by rule config, the text that it remembers now.
    """
    if not kept:
        return
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        connection.execute(_ALL, {"of": list(kept), "kept": list(kept.values()), "on": attempt})
    else:
        connection.execute(_EACH, [{"of": one, "kept": said, "on": attempt} for one, said in kept.items()])


_MISSING_ROWS = 1000
"""Rows of missing segments that one evaluation writes; the rest are counted. What comes late is found by a listing anyway."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """What an evaluation found out.

    Attributes:
        collected: the segments.
        cursor: after them, canonical text.
        progress: how far the attempt came, before the new seal.
        seal: the new seal, if any.
        context: journal positions that the next evaluation may look back to.
        judged: what the rules said.
        ended: no row came, and the attempt has ended: its silence was not judged.
        lost: earlier rows that could not be read; None where all were there.
        due_ns: when to look again without a hint.
    """

    collected: Collected
    cursor: str
    progress: AttemptProgress
    seal: SealDecision | None
    context: list[int]
    judged: list[Judged]
    ended: bool
    lost: LostContext | None
    due_ns: int | None


@dataclass(frozen=True)
class Committed:
    """What a commit left.

    Attributes:
        actions: ids of the actions that it caused.
        hinted: a hint came while the run was held, whose message may have found it held: it is to be looked at again.
        told: by rule config, the health that was last told of.
    """

    actions: list[int]
    hinted: bool
    told: dict[int, str | None]


def commit(service: Service, held: Claim, outcome: EvaluationOutcome) -> Committed | None:
    """Write an outcome if the claim still stands; None where another worker has taken the run or moved its cursor.

    Then nothing was written.
    """
    if is_quiet(service, outcome):
        came = commit_quietly(service, held, outcome, _read(held, outcome.collected))
        told = {one.row.id: one.told for one in outcome.judged}
        return None if came is None else Committed([], came != held.hints, told)
    return _commit_in_steps(service, held, outcome)


def _commit_in_steps(service: Service, held: Claim, outcome: EvaluationOutcome) -> Committed | None:
    with service.database.write() as session:
        moved = _move(session, held, outcome, service.worker)
        if moved is None:
            session.rollback()
            return None
        hints, now, health, (state, started) = moved
        _segments(session, held, outcome, now, health)
        _attempt(session, held, outcome)
        _journal(session, held, outcome)
        if state != "running" or started != outcome.collected.attempt:
            start_run(service, session, held.run_id, now)  # before what the rules say: events keep this order
        place = EventContext.of(service.base_url, held, outcome.collected.attempt, now)
        sealed = outcome.seal.step if outcome.seal else outcome.progress.sealed
        known = _memories(session, held.run_id, outcome)
        write_memories(
            session,
            place.attempt,
            {one.row.id: one.kept for one in outcome.judged if one.changed and one.row.id in known},
        )
        told: dict[int, str | None] = {}
        for judged in outcome.judged:
            memory = _remember(session, place.attempt, judged, known.get(judged.row.id))
            tell_health(session, place, judged, memory, sealed)
            told[judged.row.id] = memory.told_health
        actions = publish(service, session, place, outcome.judged, sealed)
        failpoint("evaluate.writing", held)
        return Committed(actions, hints != held.hints, told)


_RUN = RunRow.__table__.c
_HINTED = _RUN.hints != bindparam("known_hints")
_MOVE = (
    update(RunRow.__table__)  # type: ignore[arg-type]
    .where(_RUN.id == bindparam("of_run"), _RUN.epoch == bindparam("mine"), _RUN.cursor == bindparam("read"))
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
        holder=bindparam("holder"),
        due_ns=case((_HINTED, now_ns()), else_=bindparam("due", type_=BigInteger())),
        # Whoever lets a run go that has more to read, or was hinted at meanwhile, sends the next message.
        asked_ns=case((or_(_HINTED, bindparam("more", type_=Boolean())), now_ns()), else_=_RUN.asked_ns),
    )
    .returning(_RUN.hints, now_ns(), _RUN.health, _RUN.state, _RUN.state_attempt)
)


def _move(
    session: Session, held: Claim, outcome: EvaluationOutcome, holder: str
) -> tuple[int, int, dict[str, Any], tuple[str, str]] | None:
    """Take the cursor further; the hints that have come, the time, the run's health, its state and the attempt that started last."""
    last = max([-1, *(entry.key.last for entry, _ in outcome.collected.blocks)])
    values = {
        "of_run": held.run_id,
        "mine": held.epoch,
        "read": held.cursor,
        "cursor": outcome.cursor,
        "journal": held.journal + len(outcome.collected.blocks),
        "ticks": held.tick + 1,
        "last": last,
        "holder": holder,
        "known_hints": held.hints,
        "due": outcome.due_ns,
        "more": outcome.collected.more,
        "unfinished": unfinished_after(held, more=outcome.collected.more),
    }
    moved = session.connection().execute(_MOVE, values).one_or_none()
    return (
        None
        if moved is None
        else (int(moved[0]), int(moved[1]), dict(moved[2]), (str(moved[3]), str(moved[4])))
    )


_READ = (
    update(Segment.__table__)  # type: ignore[arg-type]
    .where(Segment.__table__.c.id == bindparam("row_id"))
    .values(state="read", position=bindparam("position"), ranks=bindparam("ranks"))
)


def _segments(
    session: Session, held: Claim, outcome: EvaluationOutcome, now: int, before: dict[str, Any]
) -> None:
    collected = outcome.collected
    read = _read(held, collected)
    if read:
        session.connection().execute(_READ, read)
    for entry, problem in collected.corrupt:
        session.execute(
            update(Segment).where(Segment.id == entry.row_id).values(state="corrupt", problem=problem[:2000])
        )
    missing, room = 0, _MISSING_ROWS
    for gap in collected.missing:
        missing += gap.until - gap.start
        room -= _mark_missing(session, held.run_id, gap, now, room)
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
    if health != before:
        session.execute(
            update(RunRow)
            .where(RunRow.id == held.run_id)
            .values(health=health)
            .execution_options(synchronize_session=False)
        )


def _read(held: Claim, collected: Collected) -> list[dict[str, Any]]:
    """Of each segment that was read its row, its position in the journal, and its ranks."""
    return [
        {"row_id": entry.row_id, "position": held.journal + place, "ranks": spans_of_ranks(block)}
        for place, (entry, block) in enumerate(collected.blocks)
    ]


def _mark_missing(session: Session, run_id: int, gap: Gap, now: int, most: int) -> int:
    """Note what is missing, so that it is taken up if it comes after all; returns how many rows that were."""
    who, until = gap.writer, min(gap.until, gap.start + most)
    for seq in range(gap.start, until):
        values = {
            "run_id": run_id, "attempt": who.attempt, "node": who.node, "writer": who.writer, "seq": seq,
            "first": -1, "last": -1, "state": "missing", "found_ns": now, "problem": "waited for until the deadline",
        }  # fmt: skip
        insert_missing(session, Segment, values)
    return until - gap.start


# What is written at every evaluation is made once, and written without the session: putting statements together, and
# looking for what to write, cost more than the writing.
_ATTEMPT = (
    update(Attempt.__table__)  # type: ignore[arg-type]
    .where(
        Attempt.__table__.c.run_id == bindparam("of_run"), Attempt.__table__.c.attempt == bindparam("named")
    )
    .values(
        {
            name: bindparam(name)
            for name in ("writers", "first_heard_ns", "largest", "ticks", "sealed", "context")
        }
    )
)
_TICK, _SEAL = insert(TickRow.__table__), insert(WatermarkRow.__table__)  # type: ignore[arg-type]


def _attempt(session: Session, held: Claim, outcome: EvaluationOutcome) -> None:
    progress = outcome.progress
    values = {
        "writers": writers_as_data(progress.writers),
        "first_heard_ns": progress.first_heard_ns,
        "largest": progress.largest,
        "ticks": held.tick + 1,
        "sealed": outcome.seal.step if outcome.seal else progress.sealed,
        "context": outcome.context,
    }
    named = {"of_run": held.run_id, "named": outcome.collected.attempt}
    session.connection().execute(_ATTEMPT, {**named, **values})


def _journal(session: Session, held: Claim, outcome: EvaluationOutcome) -> None:
    of = {
        "run_id": held.run_id,
        "tick": held.tick,
        "attempt": outcome.collected.attempt,
        "at_ns": held.now_ns,
    }
    position = held.journal + len(outcome.collected.blocks)
    session.connection().execute(_TICK, {**of, "position": position, "ended": outcome.ended})
    if outcome.seal:
        session.connection().execute(_SEAL, {**of, "step": outcome.seal.step, "cause": outcome.seal.cause})


def _memories(session: Session, run_id: int, outcome: EvaluationOutcome) -> dict[int, RuleStateRow]:
    """What the rules remembered, by rule config, read at once."""
    named = {"of_run": run_id, "named": outcome.collected.attempt}
    return {row.config_id: row for row in session.execute(_MEMORIES, named).scalars()}


_MEMORIES = (
    select(RuleStateRow)
    .where(
        RuleStateRow.attempt == bindparam("named"),
        RuleStateRow.config_id.in_(
            select(RuleConfigRow.id).where(RuleConfigRow.run_id == bindparam("of_run"))
        ),
    )
    .options(defer(RuleStateRow.memory))  # it is only written over, by `write_memories`
)


def _remember(session: Session, attempt: str, judged: Judged, row: RuleStateRow | None) -> RuleStateRow:
    if row is None:
        row = RuleStateRow(
            config_id=judged.row.id, attempt=attempt, memory=judged.kept, findings=0, told_health=""
        )
        session.add(row)
    if not judged.findings:
        return row
    kept = session.execute(
        select(func.count()).select_from(FindingRow).filter_by(config_id=judged.row.id, attempt=attempt)
    ).scalar_one()
    for finding in judged.findings[: max(0, FINDINGS_KEPT - kept)]:
        session.add(
            FindingRow(
                config_id=judged.row.id,
                attempt=attempt,
                step=finding.step,
                finding=json.loads(finding.model_dump_json()),
            )
        )
    row.findings += judged.found
    return row


def is_quiet(service: Service, outcome: EvaluationOutcome) -> bool:
    """Whether `commit_quietly` can write an outcome."""
    collected = outcome.collected
    if service.database.engine.dialect.name != "postgresql" or not collected.calm:
        return False
    if collected.corrupt or collected.missing or collected.failed or outcome.lost is not None:
        return False
    sealed = outcome.seal.step if outcome.seal else outcome.progress.sealed
    return all(
        one.told is not None
        and not one.findings
        and not one.transitions
        and not has_news(one.config, one.memory, one.told, sealed)
        for one in outcome.judged
    )


def commit_quietly(
    service: Service, held: Claim, outcome: EvaluationOutcome, read: list[dict[str, Any]]
) -> int | None:
    """Write it if the claim still stands; the hints that have come, or None where nothing was written."""
    values = _values(service, held, outcome, read)
    failpoint("evaluate.writing", held)
    with service.database.bare() as connection:
        row = connection.execute(_statement(connection.dialect), values).one_or_none()
    return None if row is None else int(row[0])


def _values(
    service: Service, held: Claim, outcome: EvaluationOutcome, read: list[dict[str, Any]]
) -> dict[str, Any]:
    progress, seal, blocks = outcome.progress, outcome.seal, outcome.collected.blocks
    memories = [{"config_id": one.row.id, "memory": one.kept} for one in outcome.judged if one.changed]
    return {
        "of_run": held.run_id,
        "mine": held.epoch,
        "read_cursor": held.cursor,
        "cursor": outcome.cursor,
        "journal": held.journal + len(blocks),
        "ticks": held.tick + 1,
        "unfinished": unfinished_after(held, more=outcome.collected.more),
        "last": max((entry.key.last for entry, _ in blocks), default=-1),
        "holder": service.worker,
        "known_hints": held.hints,
        "due": outcome.due_ns,
        "more": outcome.collected.more,
        "segments": json.dumps(read),
        "attempt": outcome.collected.attempt,
        "writers": json.dumps(writers_as_data(progress.writers)),
        "first_heard": progress.first_heard_ns,
        "largest": progress.largest,
        "sealed": seal.step if seal else progress.sealed,
        "context": json.dumps(outcome.context),
        "tick": held.tick,
        "at_ns": held.now_ns,
        "ended": outcome.ended,
        "cause": seal.cause if seal else None,
        "memories": json.dumps(memories),
    }


@functools.lru_cache(maxsize=8)
def _statement(dialect: Dialect) -> TextClause:
    return text(_AT_ONCE.replace("{now}", clock_expression(dialect)))


# Everything behind ``moved`` reads it, so that nothing of it is written where the fence is another's.
_AT_ONCE = """
WITH moved AS (
    UPDATE runs SET
        cursor = :cursor, journal = :journal, ticks = :ticks, lease_until_ns = 0, holder = :holder,
        unfinished_claims = :unfinished, reading = '',
        last_step = greatest(last_step, CAST(:last AS bigint)),
        due_ns = CASE WHEN hints <> :known_hints THEN {now} ELSE CAST(:due AS bigint) END,
        asked_ns = CASE WHEN hints <> :known_hints OR CAST(:more AS boolean) THEN {now} ELSE asked_ns END
    WHERE id = :of_run AND epoch = :mine AND cursor = :read_cursor
    RETURNING id, hints
), came AS (
    UPDATE segments SET state = 'read', position = given.position, ranks = given.ranks
    FROM moved, json_to_recordset(CAST(:segments AS json)) AS given (row_id bigint, position bigint, ranks json)
    WHERE segments.id = given.row_id
), went AS (
    UPDATE attempts SET
        writers = CAST(:writers AS json), first_heard_ns = :first_heard, largest = :largest, ticks = :ticks,
        sealed = CAST(:sealed AS bigint), context = CAST(:context AS json)
    FROM moved WHERE attempts.run_id = moved.id AND attempts.attempt = :attempt
), ticked AS (
    INSERT INTO ticks (run_id, tick, attempt, position, at_ns, ended)
    SELECT moved.id, CAST(:tick AS bigint), CAST(:attempt AS varchar), CAST(:journal AS bigint),
        CAST(:at_ns AS bigint), CAST(:ended AS boolean)
    FROM moved
), passed AS (
    INSERT INTO seals (run_id, tick, attempt, step, cause, at_ns)
    SELECT moved.id, CAST(:tick AS bigint), CAST(:attempt AS varchar), CAST(:sealed AS bigint),
        CAST(:cause AS varchar), CAST(:at_ns AS bigint)
    FROM moved WHERE CAST(:cause AS varchar) IS NOT NULL
), remembered AS (
    UPDATE rule_memories SET memory = given.memory
    FROM moved, json_to_recordset(CAST(:memories AS json)) AS given (config_id bigint, memory text)
    WHERE rule_memories.config_id = given.config_id AND rule_memories.attempt = :attempt
)
SELECT hints FROM moved
"""
