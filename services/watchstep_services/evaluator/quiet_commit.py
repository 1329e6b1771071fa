"""The commit of an evaluation at which nothing happened: rows came, and every rule went on as it did. One statement.

Most evaluations are such. On PostgreSQL the fence and all that is behind it are one statement, which is a transaction
by itself: of several, each costs a worker a third of a millisecond, and PostgreSQL as much. What else there is to write,
`commit` writes in steps; it also does this where the database is SQLite.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import Dialect, TextClause, text

from watchstep_services.database.clock import clock_expression
from watchstep_services.evaluator.rule_health import has_news
from watchstep_services.evaluator.seals import writers_as_data
from watchstep_services.evaluator.unfinished_reads import unfinished_after
from watchstep_services.points import reach
from watchstep_services.service import Service

if TYPE_CHECKING:
    from watchstep_services.evaluator.claim import Claim
    from watchstep_services.evaluator.commit import Outcome


def is_quiet(service: Service, outcome: Outcome) -> bool:
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


def commit_quietly(service: Service, held: Claim, outcome: Outcome, read: list[dict[str, Any]]) -> int | None:
    """Write it if the claim still stands; the hints that have come, or None where nothing was written."""
    values = _values(service, held, outcome, read)
    reach("evaluate.writing", held)
    with service.database.bare() as connection:
        row = connection.execute(_statement(connection.dialect), values).one_or_none()
    return None if row is None else int(row[0])


def _values(service: Service, held: Claim, outcome: Outcome, read: list[dict[str, Any]]) -> dict[str, Any]:
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
