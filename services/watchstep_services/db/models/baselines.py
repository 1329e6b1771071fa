"""Summaries of finished runs, and the baselines that were pinned to attempts."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import NAME_LENGTH, Base


class RunSummaryRow(Base):
    """The summary of a sound run: a `watchstep_rules.signals.ranges.baseline.RunSummary` as JSON text.

    ``program`` identifies the program and its capture configuration (`evaluator.baselines.program_of`).
    """

    __tablename__ = "run_summaries"
    __table_args__ = (Index("run_summaries_by_program", "project", "program", "ended_ns"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    program: Mapped[str] = mapped_column(String(NAME_LENGTH))
    ended_ns: Mapped[int]
    summary: Mapped[str] = mapped_column(Text)


class PinnedBaseline(Base):
    """The baseline that an attempt is compared with, frozen before its first rows were judged: a `Baseline` as JSON text."""

    __tablename__ = "pinned_baselines"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    baseline: Mapped[str] = mapped_column(Text)
