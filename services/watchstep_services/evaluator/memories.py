"""What rules remember of an attempt, written at once: an evaluation changes that of most of a run's rules."""

from __future__ import annotations

from sqlalchemy import bindparam, text, update
from sqlalchemy.orm import Session

from watchstep_services.database.models import Memory

_TABLE = Memory.__table__
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
