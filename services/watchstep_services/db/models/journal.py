"""The inbox of segments, and the journal of how they were judged."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, ForeignKey, Index, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class Segment(Base):
    """The inbox: what was announced or found on the store, and, once read, its place in the journal.

    ``ranks`` says of each rank with rows in it: rank, first step, last step, rows.
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
    """One evaluation that judged: the journal's end after it, and the clock that its rules were given.

    ``ended``: no row came, and the attempt had ended, so that silence was not judged.
    """

    __tablename__ = "ticks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    position: Mapped[int]
    at_ns: Mapped[int]
    ended: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())


class WatermarkRow(Base):
    """All steps up to this one are complete since this tick."""

    __tablename__ = "watermarks"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tick: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    cause: Mapped[str] = mapped_column(String(16))
    at_ns: Mapped[int]
