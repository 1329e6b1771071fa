"""Phase c: everything that an evaluation found out, in one short transaction, or nothing of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Boolean, bindparam, case, func, insert, or_, select, update
from sqlalchemy.orm import Session, defer

from watchstep_services.database.clock import now_ns
from watchstep_services.database.models import (
    Attempt,
    FindingRow,
    Memory,
    RuleConfigRow,
    Run,
    Seal,
    Segment,
    Tick,
)
from watchstep_services.database.upsert import insert_missing
from watchstep_services.evaluator.alerting import publish
from watchstep_services.evaluator.claim import Claim
from watchstep_services.evaluator.collect import Collected, spans_of_ranks
from watchstep_services.evaluator.inbox import FAILED_ATTEMPTS
from watchstep_services.evaluator.judging import FINDINGS_KEPT, Judged, LostContext
from watchstep_services.evaluator.lifecycle import start_run
from watchstep_services.evaluator.memories import write_memories
from watchstep_services.evaluator.place import Place
from watchstep_services.evaluator.plan import Gap
from watchstep_services.evaluator.quiet_commit import commit_quietly, is_quiet
from watchstep_services.evaluator.rule_health import tell_health
from watchstep_services.evaluator.seals import AttemptProgress, SealDecision, writers_as_data
from watchstep_services.evaluator.unfinished_reads import unfinished_after
from watchstep_services.points import reach
from watchstep_services.service import Service

_MISSING_ROWS = 1000
"""Rows of missing segments that one evaluation writes; the rest are counted. What comes late is found by a listing anyway."""


@dataclass(frozen=True)
class Outcome:
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


def commit(service: Service, held: Claim, outcome: Outcome) -> Committed | None:
    """Write an outcome if the claim still stands; None where another worker has taken the run or moved its cursor.

    Then nothing was written.
    """
    if is_quiet(service, outcome):
        came = commit_quietly(service, held, outcome, _read(held, outcome.collected))
        told = {one.row.id: one.told for one in outcome.judged}
        return None if came is None else Committed([], came != held.hints, told)
    return _commit_in_steps(service, held, outcome)


def _commit_in_steps(service: Service, held: Claim, outcome: Outcome) -> Committed | None:
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
        place = Place.of(service.base_url, held, outcome.collected.attempt, now)
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
        reach("evaluate.writing", held)
        return Committed(actions, hints != held.hints, told)


_RUN = Run.__table__.c
_HINTED = _RUN.hints != bindparam("known_hints")
_MOVE = (
    update(Run.__table__)  # type: ignore[arg-type]
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
    session: Session, held: Claim, outcome: Outcome, holder: str
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


def _segments(session: Session, held: Claim, outcome: Outcome, now: int, before: dict[str, Any]) -> None:
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
            update(Run)
            .where(Run.id == held.run_id)
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
_TICK, _SEAL = insert(Tick.__table__), insert(Seal.__table__)  # type: ignore[arg-type]


def _attempt(session: Session, held: Claim, outcome: Outcome) -> None:
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


def _journal(session: Session, held: Claim, outcome: Outcome) -> None:
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


def _memories(session: Session, run_id: int, outcome: Outcome) -> dict[int, Memory]:
    """What the rules remembered, by rule config, read at once."""
    named = {"of_run": run_id, "named": outcome.collected.attempt}
    return {row.config_id: row for row in session.execute(_MEMORIES, named).scalars()}


_MEMORIES = (
    select(Memory)
    .where(
        Memory.attempt == bindparam("named"),
        Memory.config_id.in_(select(RuleConfigRow.id).where(RuleConfigRow.run_id == bindparam("of_run"))),
    )
    .options(defer(Memory.memory))  # it is only written over, by `write_memories`
)


def _remember(session: Session, attempt: str, judged: Judged, row: Memory | None) -> Memory:
    if row is None:
        row = Memory(config_id=judged.row.id, attempt=attempt, memory=judged.kept, findings=0, told_health="")
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
