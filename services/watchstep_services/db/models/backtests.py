"""Backtests."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from watchstep_services.db.models.base import Base, RowId
from watchstep_services.db.sealed_addresses import AddressJson


class Backtest(Base):
    """A backtest that somebody asked for: which runs of a project, by which rules, and how far it came.

    Runs are judged one by one: ``next`` is the place of the one that is due, ``tries`` how often it was begun.
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
    """What a backtest found of one run; of a webhook's address the host alone."""

    __tablename__ = "backtest_results"

    backtest_id: Mapped[int] = mapped_column(ForeignKey("backtests.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    result: Mapped[dict[str, Any]]
