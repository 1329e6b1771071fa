"""Ticks and seals leave the database once the journal on the store has them: a run of weeks would keep millions."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, aliased

from watchstep_services.database.models import Attempt, Run, Seal, Tick


def purge_written(session: Session, run_id: int) -> None:
    """Delete what no part of a run's journal that is still to be written needs.

    That is the last tick before it, of whatever attempt, which says where its segments begin, and each attempt's last seal.
    """
    unwritten = (
        select(func.min(Attempt.journaled))
        .where(Attempt.run_id == run_id, Attempt.ticks > Attempt.journaled)
        .scalar_subquery()
    )
    all_ticks = select(Run.ticks).where(Run.id == run_id).scalar_subquery()
    bound = session.execute(select(func.coalesce(unwritten, all_ticks, 0))).scalar_one() - 1
    session.execute(
        delete(Tick)
        .where(Tick.run_id == run_id, Tick.tick < bound)
        .execution_options(synchronize_session=False)
    )
    later = aliased(Seal)
    followed = select(later.tick).where(
        later.run_id == run_id, later.attempt == Seal.attempt, later.tick > Seal.tick, later.tick < bound
    )
    session.execute(
        delete(Seal)
        .where(Seal.run_id == run_id, Seal.tick < bound, followed.exists())
        .execution_options(synchronize_session=False)
    )
