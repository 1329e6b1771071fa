"""Rule configs, what they remember and what they found."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.alert_life import FINGERPRINT_LENGTH, INCIDENT_LENGTH
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId
from watchstep_services.db.sealed_addresses import AddressJson


class RuleConfigRow(Base):
    """A rule config of a run, as data, and whether it may stop the job."""

    __tablename__ = "rule_configs"
    __table_args__ = (UniqueConstraint("run_id", "origin", "name"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    origin: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    data: Mapped[dict[str, Any]] = mapped_column(AddressJson)
    granted_stop: Mapped[bool] = mapped_column(Boolean)


class RuleStateRow(Base):
    """What a rule config remembers of one attempt: a `RuleMemory` as JSON text, and the health that was last told of."""

    __tablename__ = "rule_states"

    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"), primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    state: Mapped[str] = mapped_column(Text)
    findings: Mapped[int] = mapped_column(default=0)
    reported_health: Mapped[str] = mapped_column(String(16), default="", server_default="")


class AlertRow(Base):
    """Where the alert of a rule config stands on one attempt; its finding, and what is said of it to people."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("config_id", "attempt"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"))
    fingerprint: Mapped[str] = mapped_column(String(FINGERPRINT_LENGTH), default="", server_default="")
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rule: Mapped[str] = mapped_column(String(NAME_LENGTH))
    severity: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(16))
    finding: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    details: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    since_step: Mapped[int]
    since_ns: Mapped[int]
    fired_ns: Mapped[int | None] = mapped_column(default=None)
    incident: Mapped[str] = mapped_column(String(INCIDENT_LENGTH), default="", server_default="")
    resolved_ns: Mapped[int | None] = mapped_column(default=None)


class FindingRow(Base):
    """A finding; only the first of a rule config are kept, the rest are counted."""

    __tablename__ = "findings"
    __table_args__ = (Index("findings_by_config", "config_id", "attempt"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    finding: Mapped[dict[str, Any]]
