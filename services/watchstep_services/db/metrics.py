"""Prometheus metrics from the database: queues, runs, alerts. Read at a scrape, at most every two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import ColumnElement, and_, case, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import ACTION_LEASE, BACKTEST_LEASE, RUN_LEASE
from watchstep_services.db.models import ActionRow, AlertRow, Backtest, RunRow, Segment

_FRESH_SECONDS = 2.0

MOST_PROJECTS = 100
"""Limit of projects in `waiting_seconds`."""

FIGURES: dict[str, tuple[tuple[str, ...], str]] = {
    "watchstep_database_up": ((), "Whether the database answered."),
    "watchstep_runs": (("state",), "Runs, by state."),
    "watchstep_queue_length": (
        ("queue",),
        "Work that is due and not claimed: `runs` to evaluate, `actions` to try, `backtests` to continue.",
    ),
    "watchstep_queue_age_seconds": (
        ("queue",),
        "How long the oldest due work has waited. Scale workers by the age of `runs`.",
    ),
    "watchstep_segments_waiting": ((), "Segments that were announced or found, and are not evaluated yet."),
    "watchstep_segments_waiting_age_seconds": ((), "How long the oldest of them has waited."),
    "watchstep_actions_pending": (("kind",), "Unfinished actions, due or not, by kind."),
    "watchstep_alerts": (("phase", "severity"), "Alerts that are pending or firing, by severity."),
}


class DatabaseFigures(Collector):
    """Metrics of one database. Several processes on one database report the same values: aggregate them by the maximum.

    Thread-safe. If the database does not answer, only ``watchstep_database_up 0`` is reported.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._read: list[GaugeMetricFamily] = []
        self._at = float("-inf")

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The metrics' names, without a query."""
        yield from (_family(name) for name in FIGURES)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics, at most two seconds old."""
        with self._lock:
            if time.monotonic() - self._at > _FRESH_SECONDS:
                self._read = self._query()
                self._at = time.monotonic()
            yield from self._read

    def _query(self) -> list[GaugeMetricFamily]:
        up = _family("watchstep_database_up")
        try:
            with self._database.read() as session:
                families = [*_runs(session), *_queues(session), *_segments(session), *_others(session)]
        except SQLAlchemyError:
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        return [up, *families]


def _family(name: str) -> GaugeMetricFamily:
    labels, meaning = FIGURES[name]
    return GaugeMetricFamily(name, meaning, labels=labels)


def _grouped(session: Session, name: str, statement: Any) -> GaugeMetricFamily:
    """A metric from rows of labels with the value last."""
    family = _family(name)
    for *labels, value in session.execute(statement).all():
        family.add_metric([str(label) for label in labels], float(value or 0))
    return family


def _runs(session: Session) -> Iterator[GaugeMetricFamily]:
    yield _grouped(session, "watchstep_runs", select(RunRow.state, func.count()).group_by(RunRow.state))


def _queues(session: Session) -> Iterator[GaugeMetricFamily]:
    lengths, ages = _family("watchstep_queue_length"), _family("watchstep_queue_age_seconds")
    now = read_clock(session)
    queues: dict[str, tuple[ColumnElement[Any], ColumnElement[bool]]] = {
        "runs": (
            RunRow.due_ns.expression,
            (RunRow.due_ns.is_not(None)) & (RunRow.due_ns <= now_ns()) & RUN_LEASE.is_free(),
        ),
        "actions": (
            ActionRow.next_ns.expression,
            ACTION_LEASE.is_free(),
        ),
        "backtests": (
            case((Backtest.lease_until_ns > 0, Backtest.lease_until_ns), else_=Backtest.created_ns),
            BACKTEST_LEASE.is_free(),
        ),
    }
    for queue, (since, due) in queues.items():
        length, oldest = session.execute(select(func.count(), func.min(since)).where(due)).one()
        lengths.add_metric([queue], length)
        ages.add_metric([queue], 0.0 if oldest is None else max(0.0, (now - int(oldest)) / NANOSECONDS))
    yield lengths
    yield ages


def _waits() -> ColumnElement[bool]:
    """Whether a segment waits for its evaluation."""
    # Runs with waiting segments are due, now or later, or being evaluated, so no index over all segments is needed.
    open_runs = select(RunRow.id).where(RunRow.due_ns.is_not(None) | (RunRow.lease_until_ns > 0))
    return and_(Segment.run_id.in_(open_runs), Segment.state == "announced")


def waiting_seconds(database: Database) -> dict[str, float]:
    """How long the oldest waiting segment of each project has waited, the longest first, of at most `MOST_PROJECTS` projects.

    This is no metric: names of projects are shown only to those who may read them.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    since = func.min(Segment.found_ns)
    with database.read() as session:
        rows = session.execute(
            select(RunRow.project, now_ns() - since)
            .join(Segment, Segment.run_id == RunRow.id)
            .where(_waits())
            .group_by(RunRow.project)
            .order_by(since)
            .limit(MOST_PROJECTS)
        ).all()
    return {project: max(0.0, waited / NANOSECONDS) for project, waited in rows}


def _segments(session: Session) -> Iterator[GaugeMetricFamily]:
    count, oldest = session.execute(select(func.count(), func.min(Segment.found_ns)).where(_waits())).one()
    waiting, age = _family("watchstep_segments_waiting"), _family("watchstep_segments_waiting_age_seconds")
    waiting.add_metric([], count)
    age.add_metric([], 0.0 if oldest is None else max(0.0, (read_clock(session) - int(oldest)) / NANOSECONDS))
    yield waiting
    yield age


def _others(session: Session) -> Iterator[GaugeMetricFamily]:
    yield _grouped(
        session,
        "watchstep_actions_pending",
        select(ActionRow.kind, func.count()).where(ActionRow.state == "pending").group_by(ActionRow.kind),
    )
    yield _grouped(
        session,
        "watchstep_alerts",
        select(AlertRow.phase, AlertRow.severity, func.count())
        .where(AlertRow.phase.in_(("pending", "firing")))
        .group_by(AlertRow.phase, AlertRow.severity),
    )
