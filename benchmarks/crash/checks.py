"""What must hold of a training however often the service was killed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from benchmarks.crash.ground import CountedJob, Ground
from benchmarks.crash.recorders import Training
from benchmarks.crash.trainings import Calm, found_of, progress_of
from tests.services.recording import PROJECT
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, Attempt, EventRow, RunRow

SECOND = 1_000_000_000
_SOON_NS = 60 * SECOND
_EFFECTIVE = {"cooperative", "terminated", "killed"}


@dataclass
class Verdict:
    """What was found amiss, by kind, in words; and what was counted.

    Attributes:
        amiss: a sentence for each.
        stops: stops that were asked for.
        attempts: attempts that were checked.
        alerts: alerts that were checked.
        notified: (event, receiver) that somebody was told of.
        repeated: how often somebody was told once more.
        latencies_ns: from the segment with the bad step to the stop's request.
        repeated_stops: calls to stop a job that was gone already.
    """

    amiss: dict[str, list[str]] = field(default_factory=dict)
    stops: int = 0
    attempts: int = 0
    alerts: int = 0
    notified: int = 0
    repeated: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    repeated_stops: int = 0

    def add(self, kind: str, text: str) -> None:
        """Say what is amiss."""
        self.amiss.setdefault(kind, []).append(text)


@dataclass(frozen=True)
class Books:
    """A run as the database has it."""

    run: RunRow
    attempts: dict[str, Attempt]
    actions: list[ActionRow]
    events: list[dict[str, Any]]
    now_ns: int


def read_books(database: Database, run: str) -> Books | None:
    """A run; None where it is not known yet."""
    with database.read() as session:
        row = session.execute(select(RunRow).filter_by(project=PROJECT, run=run)).scalar_one_or_none()
        if row is None:
            return None
        attempts = session.execute(select(Attempt).filter_by(run_id=row.id)).scalars()
        actions = session.execute(select(ActionRow).filter_by(run_id=row.id)).scalars()
        events = session.execute(
            select(EventRow.event).filter_by(run_id=row.id).order_by(EventRow.number)
        ).scalars()
        return Books(
            row, {held.attempt: held for held in attempts}, list(actions), list(events), read_clock(session)
        )


def unsettled(books: Books | None, newest: Training) -> str:
    """What still goes on with a run; empty where it is at rest."""
    if books is None:
        return "it is not known"
    if books.run.attempt != newest.attempt:
        return f"attempt {newest.attempt} is not known"
    if not newest.over or not newest.job_is_gone:
        return "its job runs"
    if books.run.state not in {"completed", "failed", "stopped"}:
        return f"it is {books.run.state}"
    pending = [action.key for action in books.actions if action.state == "pending"]
    if pending:
        return f"pending: {', '.join(pending)}"
    if books.run.lease_until_ns > books.now_ns:
        return "it is leased"
    # An evaluation that failed is due again after some seconds: until that is done, the run is not at rest.
    if books.run.due_ns is not None and books.run.due_ns <= books.now_ns + _SOON_NS:
        return "it is due"
    behind = [held.attempt for held in books.attempts.values() if held.journaled < held.ticks]
    if behind:
        return f"the journal of {', '.join(behind)} is not on the store"
    return ""


def judge(
    verdict: Verdict, database: Database, books: Books, training: Training, calm: Calm, ground: Ground
) -> None:
    """Hold one attempt of a run at rest against what it should be."""
    name = f"{training.run}/{training.attempt}"
    verdict.attempts += 1
    expected = calm.found(training.kind, tuple(training.written), first_try=training.first_try)
    found = found_of(database, books.run.id, training.attempt)
    verdict.alerts += len(expected.alerts)
    if found != expected:
        verdict.add(
            "alerts that differ from a calm evaluation",
            f"{name}: {found.difference(expected)}; {progress_of(database, books.run.id, training.attempt)}",
        )
    events = [event for event in books.events if event["data"].get("attempt") == training.attempt]
    kinds = Counter(event["type"].removeprefix("io.watchstep.") for event in events)
    firing = len(expected.alerts)
    resolved = sum(phase == "resolved" for phase, _, _ in expected.alerts.values())
    if (kinds["alert.firing"], kinds["alert.resolved"]) != (firing, resolved):
        verdict.add("events of alerts lost or doubled", f"{name}: {dict(kinds)}")
    _stops(verdict, name, training, events, kinds)
    _jobs(verdict, name, training)
    _told(
        verdict, name, [event for event in events if event["type"].startswith("io.watchstep.alert.")], ground
    )


def _stops(verdict: Verdict, name: str, training: Training, events: list[Any], kinds: Counter[str]) -> None:
    requested, done = kinds["stop.requested"], kinds["stop.done"]
    verdict.stops += requested
    if not training.bad:
        if requested or done:
            verdict.add("healthy attempts stopped", f"{name}: {dict(kinds)}")
        return
    if requested == 0:
        verdict.add("stop events lost", name)
    elif requested > 1:
        verdict.add("stop events doubled", f"{name}: {requested}")
    how = [event["data"]["how"] for event in events if event["type"] == "io.watchstep.stop.done"]
    if len([word for word in how if word in _EFFECTIVE or word == "already ended"]) != 1:
        verdict.add("attempts without exactly one effective stop", f"{name}: {how}")
    asked = [event["time"] for event in events if event["type"] == "io.watchstep.stop.requested"]
    if asked and training.bad_ns:
        verdict.latencies_ns.append(_ns(asked[0]) - training.bad_ns)


def _ns(rfc3339: str) -> int:
    from datetime import datetime

    return int(datetime.fromisoformat(rfc3339.replace("Z", "+00:00")).timestamp() * SECOND)


def _jobs(verdict: Verdict, name: str, training: Training) -> None:
    job = training.job
    if job is None:
        return
    if isinstance(job, CountedJob):
        verdict.repeated_stops += max(0, job.calls["stop"] - 1) + max(0, job.calls["kill"] - 1)
        ended_by_us, signalled = job.ended_by, job.calls["stop"] + job.calls["kill"]
        by_itself = training.kind.on_stop == "raise"
    else:
        ended_by_us, signalled, by_itself = f"signal {-(job.returncode or 0)}", 1, False
    if training.bad and not ended_by_us and not by_itself:
        verdict.add("jobs of bad attempts that nobody stopped", name)
    if not training.bad and signalled:
        verdict.add("healthy attempts stopped", f"{name}: its job was called {signalled} times")


def _told(verdict: Verdict, name: str, events: list[Any], ground: Ground) -> None:
    for event in events:
        if event["type"] == "io.watchstep.alert.revised":  # nobody is told a second time that it fires
            continue
        if not any("webhook" in str(action) for action in event["data"]["rule_config"]["actions"]):
            continue
        times = ground.told[event["id"]]
        verdict.notified += times > 0
        verdict.repeated += max(0, times - 1)
        if not times:
            verdict.add("notifications lost", f"{name}: {event['type']} {event['id']}")
