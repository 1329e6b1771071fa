"""Groups of alerts that span runs: they belong to none, and go when nothing is left in them.

A group of one run goes with its run. What was told is known by the group's number, which never comes twice: a group that
comes back tells anew.
"""

from __future__ import annotations

from sqlalchemy import delete, select

from watchstep_services.database.clock import now_ns
from watchstep_services.database.models import AlertGroup, GroupMember
from watchstep_services.service import Service
from watchstep_services.settings import NANOSECONDS

IDLE_NS = 24 * 3600 * NANOSECONDS
_AT_ONCE = 1000


def purge_groups(service: Service) -> None:
    """Delete groups over several runs that hold no alert, have nothing to tell, and told nothing for a day."""
    held = select(GroupMember.group_id).where(GroupMember.group_id == AlertGroup.id)
    empty = (
        select(AlertGroup.id)
        .where(
            AlertGroup.run_id.is_(None),
            AlertGroup.due_ns.is_(None),
            AlertGroup.open.is_(False),
            AlertGroup.told_ns < now_ns() - IDLE_NS,
            ~held.exists(),
        )
        .limit(_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    with service.database.write() as session:
        gone = list(session.execute(empty).scalars())
        if gone:
            session.execute(
                delete(AlertGroup).where(AlertGroup.id.in_(gone)).execution_options(synchronize_session=False)
            )
