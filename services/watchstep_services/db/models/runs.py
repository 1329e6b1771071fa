"""Runs, their attempts and jobs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class RunRow(Base):
    """A run: where it stands, the fence around its evaluation, and when it is next looked at.

    ``cached_by``: the worker that evaluated it last, and has its earlier rows in memory. ``due_ns``: when it is evaluated; ``requested_ns``: when a message last said so. ``poll_ns``: when it is looked at though nobody
    hints at it; an announcement puts that off by ``poll_interval_ns``, 0 before the first look. ``urgent_ns``: when a recorder that was believed
    last said that something sudden had happened. ``registered_by``: the id of the operator's or admin's token that made it known;
    empty where nobody's did. ``unfinished_claims``: claims in a row that were neither committed nor released: their process
    ended; ``reading``: the epoch of the last of them and the segment that it was reading, noted once there were some
    (`evaluator.unfinished_reads`). ``state_attempt``: the attempt whose start or end was published last; an attempt that replaces
    it while the run is running ends it first, and one that has ended is not running again.
    """

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("project", "run"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    run: Mapped[str] = mapped_column(String(NAME_LENGTH))
    state: Mapped[str] = mapped_column(String(16), default="created", index=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    state_attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), default="", server_default="")
    epoch: Mapped[int] = mapped_column(default=0)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    cursor: Mapped[str] = mapped_column(Text, default="{}")
    journal: Mapped[int] = mapped_column(default=0)
    ticks: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int] = mapped_column(default=-1)
    control: Mapped[dict[str, Any]]
    health: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_ns: Mapped[int]
    ended_ns: Mapped[int | None] = mapped_column(default=None)
    last_seen_ns: Mapped[int]
    listed_ns: Mapped[int] = mapped_column(default=0)
    due_ns: Mapped[int | None] = mapped_column(default=None, index=True)
    hints: Mapped[int] = mapped_column(default=0)
    requested_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    poll_ns: Mapped[int] = mapped_column(default=0, server_default="0", index=True)
    poll_interval_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    cached_by: Mapped[str] = mapped_column(String(255), default="", server_default="")
    urgent_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    registered_by: Mapped[str] = mapped_column(String(16), default="", server_default="")
    unfinished_claims: Mapped[int] = mapped_column(default=0, server_default="0")
    reading: Mapped[str] = mapped_column(Text, default="", server_default="")


class Attempt(Base):
    """An attempt: its workers, how far each came, its watermark, and which segments hold the history.

    Its evaluations are the run's ticks before ``ticks``; those before ``journaled`` are on the store, in so many parts. Where
    the store refused one, the next is tried no sooner than ``journal_due_ns``.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "attempt"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    world_size: Mapped[int] = mapped_column(default=0)
    on_stop: Mapped[str] = mapped_column(String(16), default="ignore")
    started_ns: Mapped[int] = mapped_column(default=0)
    first_seen_ns: Mapped[int] = mapped_column(default=0)
    watermark: Mapped[int] = mapped_column(default=-1)
    largest: Mapped[int] = mapped_column(default=-1)
    writers: Mapped[dict[str, Any]] = mapped_column(default=dict)
    ends: Mapped[dict[str, Any]] = mapped_column(default=dict)
    context: Mapped[list[int]] = mapped_column(default=list)
    ticks: Mapped[int] = mapped_column(default=0, server_default="0")
    journaled: Mapped[int] = mapped_column(default=0, server_default="0")
    journal_parts: Mapped[int] = mapped_column(default=0, server_default="0")
    journal_due_ns: Mapped[int] = mapped_column(default=0, server_default="0")


class BoundJobRow(Base):
    """The job of one attempt, bound at launch or by an operator."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("run_id", "attempt"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    backend: Mapped[str] = mapped_column(String(32))
    job_id: Mapped[str] = mapped_column(String(256))
    identity: Mapped[dict[str, Any]]
    bound_by: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16), default="running")
    exit_code: Mapped[int | None] = mapped_column(default=None)
    gone_ns: Mapped[int | None] = mapped_column(default=None)
