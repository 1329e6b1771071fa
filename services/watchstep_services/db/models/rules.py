"""Rule configs with their states and findings; baselines; backtests."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.encrypted_addresses import AddressJson
from watchstep_services.db.models.alerts import FINGERPRINT_LENGTH, INCIDENT_LENGTH
from watchstep_services.db.models.base import NAME_LENGTH, Base, RowId


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
    """The state of a rule config on one attempt: a `RuleMemory` as JSON text, and the last reported health."""

    __tablename__ = "rule_states"

    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"), primary_key=True)
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    state: Mapped[str] = mapped_column(Text)
    findings: Mapped[int] = mapped_column(default=0)
    reported_health: Mapped[str] = mapped_column(String(16), default="", server_default="")


class AlertRow(Base):
    """The state of a rule config's alert on one attempt, with its finding and its texts."""

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
    """A finding; only the first ones of a rule config are stored, the rest are counted."""

    __tablename__ = "findings"
    __table_args__ = (Index("findings_by_config", "config_id", "attempt"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    config_id: Mapped[int] = mapped_column(ForeignKey("rule_configs.id"))
    attempt: Mapped[str] = mapped_column(String(NAME_LENGTH))
    step: Mapped[int]
    finding: Mapped[dict[str, Any]]


class RunSummaryRow(Base):
    """The summary of a completed run: a `watchstep_rules.signals.baseline.BaselineRun` as JSON text.

    ``program`` identifies the program, its arguments and its capture configuration (`evaluation.baselines.program_of`).
    """

    __tablename__ = "run_summaries"
    __table_args__ = (Index("run_summaries_by_program", "project", "program", "ended_ns"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    program: Mapped[str] = mapped_column(String(NAME_LENGTH))
    ended_ns: Mapped[int]
    summary: Mapped[str] = mapped_column(Text)


class PinnedBaseline(Base):
    """The baseline that an attempt is compared with, pinned before its first rows were evaluated: a `Baseline` as JSON text."""

    __tablename__ = "pinned_baselines"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    baseline: Mapped[str] = mapped_column(Text)


class Backtest(Base):
    """A requested backtest: the runs of a project, the rules, and its progress.

    Runs are evaluated one by one: ``next`` is the index of the next one, ``tries`` how often it was begun.
    """

    __tablename__ = "backtests"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    runs: Mapped[list[str]] = mapped_column(JSON)
    rules: Mapped[list[dict[str, Any]]] = mapped_column(AddressJson)
    sweeps: Mapped[list[str]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16), default="waiting", index=True)
    next: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    lease_until_ns: Mapped[int] = mapped_column(default=0)
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None] = mapped_column(default=None)


class BacktestResult(Base):
    """The result of a backtest for one run; webhook addresses are reduced to the host."""

    __tablename__ = "backtest_results"

    backtest_id: Mapped[int] = mapped_column(ForeignKey("backtests.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    result: Mapped[dict[str, Any]]
