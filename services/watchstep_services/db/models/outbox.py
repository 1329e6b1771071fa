"""Events, and the actions that they cause."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import Base, RowId
from watchstep_services.db.sealed_addresses import AddressJson


class EventRow(Base):
    """A CloudEvent that was published. Within a project, numbers follow the order of commits (`database.event_order`)."""

    __tablename__ = "events"
    __table_args__: Any = {"sqlite_autoincrement": True}  # noqa: RUF012 - SQLAlchemy's own way; no number comes twice

    number: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(36), unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    type: Mapped[str] = mapped_column(String(64))
    event: Mapped[dict[str, Any]]
    created_ns: Mapped[int]


class ActionRow(Base):
    """The outbox: what an event causes. The key makes it happen once."""

    __tablename__ = "actions"
    __table_args__ = (Index("actions_by_due", "state", "next_ns"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    key: Mapped[str] = mapped_column(String(700), unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    event_id: Mapped[str] = mapped_column(String(36))
    kind: Mapped[str] = mapped_column(String(16))
    payload: Mapped[dict[str, Any]] = mapped_column(AddressJson)
    stage: Mapped[int] = mapped_column(default=0)
    stage_since_ns: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(String(16), default="pending")
    claims: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    next_ns: Mapped[int] = mapped_column(default=0)
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None] = mapped_column(default=None)
    outcome: Mapped[str] = mapped_column(Text, default="")
    traceparent: Mapped[str] = mapped_column(String(55), default="", server_default="")


class ActionTry(Base):
    """One try of an action, and what came of it."""

    __tablename__ = "action_tries"

    action_id: Mapped[int] = mapped_column(ForeignKey("actions.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at_ns: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(Text)
