"""Retention policies: retention times, the next due step, and groups of alerts over several runs.

A group of one run is deleted with its run, and a group of several once it contains no alert. Ids of notifications contain the
group's number, which is never reused, so a recreated group notifies again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.clock import now_ns
from watchstep_services.db.models import AlertGroup, GroupMember, RetentionPolicy
from watchstep_services.service.context import Service

Step = Literal["delete_run", "summarize", "compact", "delete_originals", "delete_tensors"]


@dataclass(frozen=True)
class RetentionTimes:
    """Nanoseconds after a run's end or, for the originals, after its compaction; None for never."""

    compact_after: int | None
    originals: int | None
    tensors: int | None
    runs: int | None


@dataclass(frozen=True)
class UpkeepProgress:
    """The completed upkeep of a run that ended at ``ended_ns``; times by the database's clock."""

    ended_ns: int
    compacted_ns: int | None = None
    originals_gone_ns: int | None = None
    tensors_gone_ns: int | None = None
    deleting: bool = False
    on_hold: bool = False
    summarized_ns: int | None = None


def policy_of(session: Session, settings: Settings, project: str) -> RetentionTimes:
    """A project's policy, with the settings' values as defaults. Runs and tensors are deleted only if the project's policy says so."""
    own = session.get(RetentionPolicy, project)
    compact: float | None = None if own is None else own.compact_after_s
    originals: float | None = None if own is None else own.originals_s
    return RetentionTimes(
        compact_after=_ns(settings.compact_after_seconds if compact is None else compact) or None,
        originals=_ns(settings.originals_seconds if originals is None else originals),
        tensors=_ns(None if own is None else own.keep_tensors_s),
        runs=_ns(None if own is None else own.keep_runs_s),
    )


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NANOSECONDS)


def next_step(policy: RetentionTimes, progress: UpkeepProgress) -> tuple[Step, int] | None:
    """The next step and when it is due, in nanoseconds; None if no step follows.

    A deletion that has begun is completed even if the policy changes, unless the run is on hold.
    """
    steps: list[tuple[int, Step]] = []
    if not progress.on_hold:
        if progress.deleting:
            return "delete_run", progress.ended_ns
        if policy.runs is not None:
            steps.append((progress.ended_ns + policy.runs, "delete_run"))
        if policy.tensors is not None and progress.tensors_gone_ns is None:
            steps.append((progress.ended_ns + policy.tensors, "delete_tensors"))
    if progress.summarized_ns is None:
        steps.append((progress.ended_ns, "summarize"))
    if policy.compact_after is not None and progress.compacted_ns is None:
        steps.append((progress.ended_ns + policy.compact_after, "compact"))
    if (
        policy.originals is not None
        and progress.compacted_ns is not None
        and progress.originals_gone_ns is None
    ):
        steps.append((progress.compacted_ns + policy.originals, "delete_originals"))
    if not steps:
        return None
    # If two are due together, permanent deletions come first, because they make other steps unnecessary.
    at, step = min(steps, key=lambda due: (due[0], _ORDER.index(due[1])))
    return step, at


_ORDER: tuple[Step, ...] = ("delete_run", "delete_tensors", "summarize", "compact", "delete_originals")


IDLE_NS = 24 * 3600 * NANOSECONDS
_AT_ONCE = 1000


def purge_groups(service: Service) -> None:
    """Delete groups over several runs without alerts, without open notifications, and without a notification for a day."""
    has_members = select(GroupMember.group_id).where(GroupMember.group_id == AlertGroup.id)
    empty = (
        select(AlertGroup.id)
        .where(
            AlertGroup.run_id.is_(None),
            AlertGroup.due_ns.is_(None),
            AlertGroup.open.is_(False),
            AlertGroup.notified_ns < now_ns() - IDLE_NS,
            ~has_members.exists(),
        )
        .limit(_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    with service.database.write() as session:
        empty_ids = list(session.execute(empty).scalars())
        if empty_ids:
            session.execute(
                delete(AlertGroup)
                .where(AlertGroup.id.in_(empty_ids))
                .execution_options(synchronize_session=False)
            )
