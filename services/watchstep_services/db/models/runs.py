"""Runs, their attempts and jobs; segments and the journal of their evaluation; retention."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, ForeignKey, Index, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column, relationship

from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId
from watchstep_services.db.models.stores import ProjectStore

TAG_LENGTH = 64


class RunRow(Base):
    """A run: its state, the fence of its evaluation, and the times of its next evaluation and poll.

    ``project_store_id``: the store that it was registered with. ``registered_ns``: when it was last registered, as each
    process that records it does; ``evaluated_ns``: when rows of it were last evaluated, 0 before the first.
    ``cached_by``: the worker that evaluated it last, and has its earlier rows in memory. ``due_ns``: when it is due for evaluation;
    ``requested_ns``: when a message was last sent for it. ``poll_ns``: when it is polled without a hint; an announcement postpones it by
    ``poll_interval_ns``, which is 0 before the first poll, unless ``ignored_ns`` is set: when segments of an announcement were last ignored
    that no listing has added since; 0 for none. ``urgent_ns``: when a trusted recorder last reported a sudden failure.
    ``registered_by``: the id of the operator's or admin's token that registered it; empty if none did. ``unfinished_claims``: claims in a
    row without a commit or a release, because their process ended; ``reading``: the epoch of the last of them and the segment that it was
    reading, recorded once there were some (`evaluation.unfinished_reads`). ``state_attempt``: the attempt of the last published start or
    end. An attempt that replaces it while the run is running ends it first, and one that has ended is not running again.
    ``waits_for_turn``: its last evaluation was large and ended because another large evaluation of the project was in progress.
    """

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("project", "run"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    run: Mapped[str] = mapped_column(String(NAME_LENGTH))
    project_store_id: Mapped[int] = mapped_column(
        ForeignKey("project_stores.id", name="fk_runs_project_store_id_project_stores"), index=True
    )
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
    ignored_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    cached_by: Mapped[str] = mapped_column(String(255), default="", server_default="")
    urgent_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    registered_by: Mapped[str] = mapped_column(String(16), default="", server_default="")
    unfinished_claims: Mapped[int] = mapped_column(default=0, server_default="0")
    reading: Mapped[str] = mapped_column(Text, default="", server_default="")
    waits_for_turn: Mapped[bool] = mapped_column(default=False, server_default=false())
    registered_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    evaluated_ns: Mapped[int] = mapped_column(default=0, server_default="0")
    project_store: Mapped[ProjectStore] = relationship()

    @property
    def place(self) -> StorePlace:
        """Where it is read from: the location that it was registered with. Requires an open session."""
        return self.project_store.place


class RunTag(Base):
    """A tag of a run, by which people find it."""

    __tablename__ = "run_tags"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(String(TAG_LENGTH), primary_key=True)
    added_ns: Mapped[int]
    added_by: Mapped[str] = mapped_column(String(256), default="")


class Attempt(Base):
    """An attempt: its workers and their progress, its watermark, and the segments of its history.

    Its evaluations are the run's ticks before ``ticks``; those before ``journaled`` are on the store, in ``journal_parts`` parts. If
    the store refused a part, the next one is not tried before ``journal_due_ns``.
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
    ranks: Mapped[dict[str, Any]] = mapped_column(default=dict)
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


class Segment(Base):
    """The inbox: a segment that was announced or found on the store, and its position in the journal once it was read.

    ``ranks`` lists (rank, first step, last step, rows) of each rank with rows.
    """

    __tablename__ = "segments"
    __table_args__ = (
        UniqueConstraint("run_id", "attempt", "node", "writer", "seq"),
        Index("segments_by_state", "run_id", "state"),
        Index("segments_by_position", "run_id", "position"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    node: Mapped[str] = mapped_column(String(NAME_LENGTH))
    writer: Mapped[str] = mapped_column(String(NAME_LENGTH))
    seq: Mapped[int]
    first: Mapped[int]
    last: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    found_ns: Mapped[int]
    position: Mapped[int | None] = mapped_column(default=None)
    ranks: Mapped[list[list[int]] | None] = mapped_column(JSON(none_as_null=True), default=None)
    problem: Mapped[str] = mapped_column(Text, default="")
    traceparent: Mapped[str] = mapped_column(String(55), default="", server_default="")


class TickRow(Base):
    """An evaluation with a tick: the end of the journal after it, and the time that its rules were given.

    ``ended``: no row arrived and the attempt had ended, so silence was not evaluated.
    """

    __tablename__ = "ticks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    position: Mapped[int]
    at_ns: Mapped[int]
    ended: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())


class WatermarkRow(Base):
    """The step up to which all steps are complete since this tick."""

    __tablename__ = "watermarks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    cause: Mapped[str] = mapped_column(String(16))
    at_ns: Mapped[int]


class RetentionPolicy(Base):
    """Retention times of a project, in seconds after a run's end; None for ever, or for the settings' value."""

    __tablename__ = "retention_policies"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    compact_after_s: Mapped[int | None] = mapped_column(default=None)
    originals_s: Mapped[int | None] = mapped_column(default=None)
    keep_tensors_s: Mapped[int | None] = mapped_column(default=None)
    keep_runs_s: Mapped[int | None] = mapped_column(default=None)
    changed_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    changed_ns: Mapped[int]


class Upkeep(Base):
    """The upkeep of a run after its end, and when the next step is due.

    ``ended_ns`` is the end that the times refer to; after the end of another attempt all steps are due again. Nothing of a run
    that is ``on_hold`` is deleted, whatever the policy says.
    """

    __tablename__ = "upkeep"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    ended_ns: Mapped[int] = mapped_column(default=0)
    next_ns: Mapped[int] = mapped_column(default=0, index=True)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    summarized_ns: Mapped[int | None] = mapped_column(default=None)
    compacted_ns: Mapped[int | None] = mapped_column(default=None)
    originals_gone_ns: Mapped[int | None] = mapped_column(default=None)
    tensors_gone_ns: Mapped[int | None] = mapped_column(default=None)
    deleting: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    on_hold: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    hold_by: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    hold_reason: Mapped[str] = mapped_column(Text, default="")
    tries: Mapped[int] = mapped_column(default=0)
    problem: Mapped[str] = mapped_column(Text, default="")
