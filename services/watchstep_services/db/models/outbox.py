"""Events, the actions that they cause, and the audit log of stops."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.encrypted_addresses import AddressJson
from watchstep_services.db.models.alerts import WHO_LENGTH
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class EventRow(Base):
    """A published CloudEvent. Within a project, numbers follow the order of commits (`db.engine.write_events`)."""

    __tablename__ = "events"
    __table_args__: Any = {"sqlite_autoincrement": True}  # noqa: RUF012 - SQLAlchemy's convention; numbers are never reused

    number: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(36), unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    type: Mapped[str] = mapped_column(String(64))
    event: Mapped[dict[str, Any]]
    created_ns: Mapped[int]


class ActionRow(Base):
    """The outbox: an action that an event causes. Its unique key prevents duplicates."""

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
    """One try of an action, and its result."""

    __tablename__ = "action_tries"

    action_id: Mapped[int] = mapped_column(ForeignKey("actions.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at_ns: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(Text)


class StopGrant(Base):
    """An operator's permission that exactly this rule may stop jobs of a project, until it is revoked."""

    __tablename__ = "stop_grants"
    __table_args__ = (Index("stop_grants_by_digest", "project", "digest"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    digest: Mapped[str] = mapped_column(String(64))
    judges: Mapped[dict[str, Any]]
    granted_by: Mapped[str] = mapped_column(String(WHO_LENGTH))
    reason: Mapped[str] = mapped_column(Text)
    granted_ns: Mapped[int]
    revoked_by: Mapped[str] = mapped_column(String(WHO_LENGTH), default="")
    revoked_reason: Mapped[str] = mapped_column(Text, default="")
    revoked_ns: Mapped[int | None] = mapped_column(default=None)


class AuditEntry(Base):
    """An entry of the audit log of stops. The database refuses to change or delete one.

    No foreign key refers to a run, because entries outlive it.
    """

    __tablename__ = "stop_audit"
    __table_args__ = (
        Index("stop_audit_by_run", "project", "run", "id"),
        Index("stop_audit_by_project", "project", "id"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    run: Mapped[str] = mapped_column(String(NAME_LENGTH))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    kind: Mapped[str] = mapped_column(String(16))
    at_ns: Mapped[int]
    who: Mapped[str] = mapped_column(String(WHO_LENGTH))
    data: Mapped[dict[str, Any]]
