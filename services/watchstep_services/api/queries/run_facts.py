"""What is known about runs without their statistics: a fixed number of database queries for any number of runs, and none to a store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from watchstep_services.api.schemas.models import AlertCounts
from watchstep_services.api.schemas.run_pages import HealthDigest, HealthLevel, Overhead, RunFacts, StepRate
from watchstep_services.core.events import run_url
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import (
    AlertInstanceRow,
    AlertRow,
    Attempt,
    RunRow,
    RunTag,
    Segment,
    WatermarkRow,
)
from watchstep_services.runs.discovery import UNLISTED
from watchstep_services.runs.lifecycle import health_of, quiet_since

_SECOND = 1_000_000_000
_RECENT_NS = 600 * _SECOND
_EARLIEST_NS = 946_684_800 * _SECOND
"""The year 2000: an attempt with an earlier start has no clock."""

_MAX_PROBLEMS = 5
_MAX_TEXT = 300
_LARGEST = 2**53
_DROPPED = ("dropped_", "unwritten_", "refused_")
"""Prefixes of a recorder's counters of what is not on the store."""


def facts_of(session: Session, base_url: str, rows: Sequence[RunRow]) -> list[RunFacts]:
    """Return the facts about runs, in the order of their rows."""
    related, now = _Related.read(session, rows), read_clock(session)
    return [_facts(base_url, row, related, now) for row in rows]


@dataclass(frozen=True)
class AttemptTimes:
    """Progress of one attempt, without its workers."""

    run_id: int
    attempt: str
    started_ns: int
    first_seen_ns: int
    largest: int
    world_size: int


@dataclass
class _Related:
    """Rows of other tables, by the id of their run."""

    attempts: dict[int, list[AttemptTimes]] = field(default_factory=lambda: defaultdict(list))
    alerts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    tags: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    recent: dict[int, StepRate] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, session: Session, rows: Sequence[RunRow]) -> _Related:
        ids = [row.id for row in rows]
        related = cls()
        of_runs = (
            select(
                Attempt.run_id,
                Attempt.attempt,
                Attempt.started_ns,
                Attempt.first_seen_ns,
                Attempt.largest,
                Attempt.world_size,
            )
            .where(Attempt.run_id.in_(ids))
            .order_by(Attempt.id)
        )
        for values in session.execute(of_runs):
            related.attempts[values.run_id].append(AttemptTimes(*values))
        tags = select(RunTag.run_id, RunTag.tag).where(RunTag.run_id.in_(ids)).order_by(RunTag.tag)
        for run_id, tag in session.execute(tags):
            related.tags[run_id].append(tag)
        related._count_alerts(session, ids)
        related._measure(session, ids)
        ended = [row.id for row in rows if row.state in ("completed", "failed", "stopped")]
        newest = and_(RunRow.id == Attempt.run_id, RunRow.attempt == Attempt.attempt)
        if ended:
            ends = select(Attempt.run_id, Attempt.ends).join(RunRow, newest).where(Attempt.run_id.in_(ended))
            related.ends = {row.run_id: row.ends for row in session.execute(ends)}
        return related

    def _count_alerts(self, session: Session, ids: Sequence[int]) -> None:
        """Count alerts over all attempts, and those pending on the newest one."""
        group = (AlertInstanceRow.run_id, AlertInstanceRow.phase, AlertInstanceRow.severity)
        counted = select(*group, func.count()).where(AlertInstanceRow.run_id.in_(ids)).group_by(*group)
        for run_id, phase, severity, number in session.execute(counted):
            self.alerts[run_id][phase] += number
            if phase == "firing" and severity == "info":
                self.alerts[run_id]["notes"] += number
        newest = and_(RunRow.id == AlertRow.run_id, RunRow.attempt == AlertRow.attempt)
        pending = (
            select(AlertRow.run_id, func.count())
            .join(RunRow, newest)
            .where(AlertRow.run_id.in_(ids), AlertRow.phase == "pending")
            .group_by(AlertRow.run_id)
        )
        for run_id, number in session.execute(pending):
            self.alerts[run_id]["pending"] = number

    def _measure(self, session: Session, ids: Sequence[int]) -> None:
        """Measure the recent rate by the watermarks that the journal has not taken yet; for others, find the first step."""
        newest = and_(RunRow.id == WatermarkRow.run_id, RunRow.attempt == WatermarkRow.attempt)
        recent = (
            select(
                WatermarkRow.run_id,
                func.min(WatermarkRow.step),
                func.max(WatermarkRow.step),
                func.min(WatermarkRow.at_ns),
                func.max(WatermarkRow.at_ns),
            )
            .join(RunRow, newest)
            .where(
                WatermarkRow.run_id.in_(ids),
                RunRow.state == "running",
                WatermarkRow.at_ns >= RunRow.last_seen_ns - _RECENT_NS,
            )
            .group_by(WatermarkRow.run_id)
        )
        for run_id, first, last, since, until in session.execute(recent):
            rate = _rate(last - first, until - since)
            if rate is not None:
                self.recent[run_id] = StepRate(steps_per_second=rate, kind="recent")
        others = [run_id for run_id in ids if run_id not in self.recent]
        newest = and_(RunRow.id == Segment.run_id, RunRow.attempt == Segment.attempt)
        first_steps = (
            select(Segment.run_id, func.min(Segment.first).label("first"))
            .join(RunRow, newest)
            .where(Segment.run_id.in_(others), Segment.seq == 0)
            .group_by(Segment.run_id)
        )
        self.first_steps = {row.run_id: row.first for row in session.execute(first_steps)}


def _rate(steps: int, nanoseconds: int) -> float | None:
    return steps * _SECOND / nanoseconds if steps > 0 and nanoseconds > 0 else None


def _facts(base_url: str, row: RunRow, related: _Related, now: int) -> RunFacts:
    attempts = related.attempts[row.id]
    ended = _end_of(row, related.ends.get(row.id, {}), attempts)
    until = ended or row.last_seen_ns
    starts = [times.started_ns for times in attempts if _EARLIEST_NS <= times.started_ns <= until]
    started = min(starts, default=None)
    counts = related.alerts[row.id]
    return RunFacts(
        project=row.project,
        run=row.run,
        url=run_url(base_url, row.project, row.run),
        state=row.state,
        attempt=row.attempt,
        attempts=len(attempts),
        workers=next((times.world_size for times in attempts if times.attempt == row.attempt), 0),
        last_step=row.last_step,
        max_step=max_step_of(row.health),
        rate=related.recent.get(row.id) or _mean_rate(row, attempts, related.first_steps.get(row.id), until),
        created_ns=row.created_ns,
        started_ns=started,
        last_seen_ns=row.last_seen_ns,
        ended_ns=ended,
        duration_ns=None if started is None else until - started,
        overhead=overhead_of_run(row.health),
        health=digest_of(health_of(row, now)),
        quiet_since_ns=quiet_since(row, now),
        alerts=AlertCounts(**{phase: counts[phase] for phase in AlertCounts.model_fields}),
        tags=related.tags[row.id],
        reason=reason_of(row, related.ends.get(row.id, {})),
    )


def _end_of(row: RunRow, ends: Mapping[str, Any], attempts: Sequence[AttemptTimes]) -> int | None:
    """Return when the last worker of the newest attempt ended by its own record; the time that the service noticed where it is not known.

    A service may find a run long after its end.
    """
    newest = next((times for times in attempts if times.attempt == row.attempt), None)
    if row.ended_ns is None or newest is None or len(ends) < max(1, newest.world_size):
        return row.ended_ns
    recorded = max(int(end.get("ended_ns", 0)) for end in ends.values())
    return recorded if newest.started_ns <= recorded <= row.ended_ns else row.ended_ns


def _mean_rate(
    row: RunRow, attempts: Sequence[AttemptTimes], first: int | None, until: int
) -> StepRate | None:
    newest = next((times for times in attempts if times.attempt == row.attempt), None)
    if newest is None or first is None or newest.started_ns < _EARLIEST_NS:
        return None
    rate = _rate(newest.largest + 1 - first, until - newest.started_ns)
    return None if rate is None else StepRate(steps_per_second=rate, kind="mean")


def reason_of(row: RunRow, ends: Mapping[str, Any]) -> str:
    """Return why the newest attempt was stopped or failed; empty if it was not, or the reason is not known."""
    if row.state not in ("failed", "stopped"):
        return ""
    stop = row.control.get("stop")
    if row.state == "stopped" and isinstance(stop, dict) and stop.get("attempt") == row.attempt:
        return str(stop.get("reason", ""))
    return reason_of_ends(ends)


def reason_of_ends(ends: Mapping[str, Any]) -> str:
    """Return the reason of the first worker that failed or was stopped, workers ascending; empty if there is none."""
    for _, end in sorted(ends.items(), key=lambda entry: (len(entry[0]), entry[0])):
        if isinstance(end, dict) and end.get("state") in ("failed", "stopped") and end.get("reason"):
            return str(end["reason"])
    return ""


def reports_of(health: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield writer and report of each recorder of a run, by writer."""
    recorders = health.get("recorders")
    for writer, report in sorted(recorders.items()) if isinstance(recorders, dict) else ():
        if isinstance(report, dict):
            yield writer, report


def overhead_of(report: Mapping[str, Any]) -> Overhead | None:
    """Return the overhead that a recorder reports; None if it has no budget."""
    overhead = report.get("overhead")
    if not isinstance(overhead, dict):
        return None
    share = _share(overhead.get("share"))
    if share is None:
        return None
    steps = overhead.get("steps")
    return Overhead(
        share=share,
        recent_share=_share(overhead.get("recent_share")),
        budget=_share(overhead.get("budget")),
        steps=steps if type(steps) is int and 0 <= steps < _LARGEST else None,
    )


def overhead_of_run(health: Mapping[str, Any]) -> Overhead | None:
    """Return the largest overhead of a run's recorders."""
    found = [overhead for _, report in reports_of(health) if (overhead := overhead_of(report)) is not None]
    return max(found, key=lambda overhead: overhead.share, default=None)


def _share(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= _LARGEST else None


def max_step_of(health: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a run will make, as its recorders report it; None if they do not."""
    found = [report.get("max_step") for _, report in reports_of(health)]
    return max((step for step in found if type(step) is int and 0 < step < _LARGEST), default=None)


def faults_of(report: Mapping[str, Any]) -> int:
    """Return the number of a recorder's faults."""
    return _sum_of(report, ("faults",))


def dropped_of(report: Mapping[str, Any]) -> int:
    """Return how many rows, steps and objects a recorder dropped."""
    return _sum_of(report, _DROPPED)


def _sum_of(report: Mapping[str, Any], prefixes: tuple[str, ...]) -> int:
    counts = report.get("counts")
    entries = counts.items() if isinstance(counts, dict) else ()
    return sum(
        min(number, _LARGEST)
        for name, number in entries
        if type(number) is int and number > 0 and name.startswith(prefixes)
    )


def digest_of(health: Mapping[str, Any]) -> HealthDigest:
    """Summarize the health of a run."""
    reports = [report for _, report in reports_of(health)]
    faults, dropped = sum(map(faults_of, reports)), sum(map(dropped_of, reports))
    problems = list(dict.fromkeys(_problems(health, reports)))
    level: HealthLevel = "ok" if reports else "unknown"
    if dropped or problems:
        level = "warning"
    if faults:
        level = "fault"
    return HealthDigest(
        level=level,
        recorders=len(reports),
        faults=faults,
        dropped=dropped,
        problems=problems[:_MAX_PROBLEMS],
    )


def _problems(health: Mapping[str, Any], reports: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for report in reports:
        faults = report.get("faults")
        for where, text in faults.items() if isinstance(faults, dict) else ():
            yield f"{where}: {text}"[:_MAX_TEXT]
    for name, text in problems_of_documents(health).items():
        yield f"{name}: {text}"[:_MAX_TEXT]


def problems_of_documents(health: Mapping[str, Any]) -> dict[str, str]:
    """Return the problems that the service found: documents, segments and listings, each with its problem."""
    problems: dict[str, str] = {}
    for name, value in health.items():
        if name in ("recorders", UNLISTED) or not value:
            continue
        if isinstance(value, dict):
            problems |= {str(key): str(text)[:_MAX_TEXT] for key, text in value.items()}
        else:
            problems[name] = str(value)[:_MAX_TEXT]
    return problems
