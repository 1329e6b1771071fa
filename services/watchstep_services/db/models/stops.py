"""Which rules may stop jobs, by whose word, and what became of every stop."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.alert_life import WHO_LENGTH
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


class StopGrant(Base):
    """An operator's word that exactly this rule may stop jobs of a project, until it is taken back."""

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
    """One line of the story of a stop. Rows are only ever added: the database refuses to change or delete one.

    No key leads to a run: entries outlive it.
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
