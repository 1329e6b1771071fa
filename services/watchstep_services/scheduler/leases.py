"""Leases of an embedded service that was killed: the next one of its home need not wait until they end."""

from __future__ import annotations

from sqlalchemy import update

from watchstep_services.database.clock import now_ns
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Action, Run

_OVER_NS = 1
"""A lease that is over. One that was given back is 0, and a claim that finds one over knows that its holder died."""


def end_leases(database: Database) -> None:
    """End every lease on runs, and let every stop that waits be tried at once.

    Only for a database that no other process uses. What a process that died had claimed is fenced: a new claim has a
    new number.
    """
    with database.write() as session:
        for statement in (
            update(Run).where(Run.lease_until_ns > now_ns()).values(lease_until_ns=_OVER_NS),
            update(Action)
            .where(Action.kind == "stop", Action.state == "pending", Action.next_ns > now_ns())
            .values(next_ns=now_ns()),
        ):
            session.execute(statement.execution_options(synchronize_session=False))
