"""Many runs at once: from a segment that lies on the store to the stop that it causes, and what that costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import func, select

from benchmarks.report import Figure, Report
from benchmarks.service.servers import Production, production
from benchmarks.service.simulated import Plan, Told
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, ActionTry, EventRow, RunRow, Segment

PERIOD = 2.0
STEPS = 4
SETTLE_SECONDS = 30.0
DRAIN_SECONDS = 600.0
"""Time after which a bad segment without a stop counts as lost even if its run still waits."""


@dataclass(frozen=True)
class Spent:
    """What had been done and spent at a moment."""

    cpu: dict[str, float]
    segments: int
    evaluations: int
    transactions: int
    wal: int

    def since(self, before: Spent) -> Spent:
        """What came to it."""
        return Spent(
            {name: spent - before.cpu.get(name, 0.0) for name, spent in self.cpu.items()},
            self.segments - before.segments,
            self.evaluations - before.evaluations,
            self.transactions - before.transactions,
            self.wal - before.wal,
        )


def spent(made: Production) -> Spent:
    """As it stands now."""
    with made.database.read() as session:
        segments = session.execute(
            select(func.count()).select_from(Segment).filter_by(state="read")
        ).scalar_one()
        evaluations = int(session.execute(select(func.coalesce(func.sum(RunRow.ticks), 0))).scalar_one())
        raw = session.connection()
        transactions, wal = raw.exec_driver_sql(
            "SELECT (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()), "
            "pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        ).one()
    return Spent(made.cpu(), segments, evaluations, transactions, int(wal))


@contextmanager
def simulating(plan: Plan, folder: Path) -> Iterator[Callable[[], Told]]:
    """Simulated recorders that begin at once; what is given waits for their end."""
    asked, result = folder / "plan.json", folder / "told.json"
    asked.write_text(json.dumps(asdict(plan)))
    command = [sys.executable, "-m", "benchmarks.service.simulated", str(asked), str(result)]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert running.stdin is not None
    assert running.stdout is not None

    def told() -> Told:
        if running.wait() != 0:
            raise RuntimeError("the simulation failed")
        return Told(**json.loads(result.read_text()))

    try:
        running.stdout.readline()
        running.stdin.write(b"\n")
        running.stdin.flush()
        yield told
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        running.stdin.close()
        running.stdout.close()


@dataclass(frozen=True)
class Stops:
    """Of the runs with a bad segment: seconds from it to the stop's request, and to the control document that asks.

    Attributes:
        requested: by run.
        asked: by run.
        never: runs without a request.
    """

    requested: dict[str, float]
    asked: dict[str, float]
    never: list[str]


def stops(database: Database, told: Told) -> Stops:
    """What has become of the bad segments so far."""
    with database.read() as session:
        requested = dict(
            session.execute(
                select(RunRow.run, func.min(EventRow.created_ns))
                .join(EventRow, EventRow.run_id == RunRow.id)
                .where(EventRow.type == "io.watchstep.stop.requested")
                .group_by(RunRow.run)
            )
            .tuples()
            .all()
        )
        asked = dict(
            session.execute(
                select(RunRow.run, func.min(ActionTry.at_ns))
                .join(ActionRow, ActionRow.run_id == RunRow.id)
                .join(ActionTry, ActionTry.action_id == ActionRow.id)
                .where(ActionRow.kind == "stop")
                .group_by(RunRow.run)
            )
            .tuples()
            .all()
        )
    stopped = [(run, written) for run, (written, _) in told.bad.items() if run in requested]
    return Stops(
        {run: (requested[run] - written) / 1e9 for run, written in stopped},
        {run: (asked[run] - written) / 1e9 for run, written in stopped if run in asked},
        sorted(set(told.bad) - set(requested)),
    )


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so many are not above; None of nothing."""
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def settle(database: Database, told: Told) -> int:
    """Wait until the bad segments have been judged.

    Returns:
        The number of runs without a stop after `SETTLE_SECONDS`. Then runs that still wait for their evaluation are waited for: those
        without a stop after that are lost.
    """
    began = time.monotonic()
    while stops(database, told).never and time.monotonic() < began + SETTLE_SECONDS:
        time.sleep(0.5)
    late = len(stops(database, told).never)
    while (never := stops(database, told).never) and time.monotonic() < began + DRAIN_SECONDS:
        if not _waiting(database, never):
            break
        time.sleep(0.5)
    return late


def _waiting(database: Database, runs: list[str]) -> int:
    """Segments of runs that have not been evaluated."""
    with database.read() as session:
        return session.execute(
            select(func.count())
            .select_from(Segment)
            .join(RunRow, RunRow.id == Segment.run_id)
            .where(RunRow.run.in_(runs), Segment.state == "announced")
        ).scalar_one()


def add_load_figures(report: Report, *, quick: bool, runs: int = 0, seconds: float = 0.0) -> None:
    """Production with 200 runs, or as many and for as long as given."""
    runs = runs or (40 if quick else 200)
    warm, measured = (12.0, 16.0) if quick else (30.0, 120.0)
    seconds = seconds or measured
    with production(2, 1) as made:  # a process for each core, each with the earlier rows of its runs
        plan = Plan(made.url, made.recorder, made.store, runs, PERIOD, STEPS, warm, seconds, bad_share=0.012)
        with simulating(plan, made.folder) as ended:
            time.sleep(warm)
            before = spent(made)
            began = time.monotonic()
            time.sleep(max(0.0, seconds - 1.0))
            took = spent(made).since(before)
            lasted = time.monotonic() - began
            told = ended()
        late = settle(made.database, told)
        _add(report, told, made, took, lasted, late)


def _add(report: Report, told: Told, made: Production, took: Spent, lasted: float, late: int) -> None:
    found = stops(made.database, told)
    behind = f"the simulation itself was up to {told.late:.2f} s behind, {told.failed} announcements failed"
    unsaid = set(told.unsaid)
    for name, runs in (
        ("recorder says urgent", set(told.bad) - unsaid),
        ("only rules see it", unsaid),
    ):
        requested = [seconds for run, seconds in found.requested.items() if run in runs]
        asked = [seconds for run, seconds in found.asked.items() if run in runs]
        for share, target in ((0.5, 0.5), (0.99, 2.0)):
            report.add(
                f"{name}: segment written to stop requested, p{share * 100:g}",
                Figure(quantile(requested, share), "s", target, note=f"{len(requested)} stops"),
            )
        report.add(
            f"{name}: segment written to control document, p99",
            Figure(quantile(asked, 0.99), "s", note=f"{len(asked)} stops"),
        )
    report.add(
        f"bad segments without a stop {SETTLE_SECONDS:g} s after the end",
        Figure(float(late), "runs", 0, note=behind),
    )
    report.add(
        "bad segments without a stop when nothing waits",
        Figure(float(len(found.never)), "runs", 0, note=", ".join(found.never)),
    )
    cores = sum(took.cpu.values()) / lasted
    shares = ", ".join(f"{name} {value / lasted:.2f}" for name, value in sorted(took.cpu.items()))
    report.add("CPU of the service", Figure(cores, "cores", 2.0, note=shares))
    report.add(
        "CPU of the simulation",
        Figure(told.cpu / (lasted or 1.0), "cores", note="apart; it shares the machine with the service"),
    )
    done = max(1, took.segments)
    report.add(
        "CPU for a segment",
        Figure(
            1000 * sum(took.cpu.values()) / done,
            "ms",
            note=", ".join(f"{name} {1000 * value / done:.1f}" for name, value in sorted(took.cpu.items())),
        ),
    )
    report.add(
        "segments judged",
        Figure(took.segments / lasted, "1/s", note=f"{took.evaluations / lasted:.0f} evaluations/s"),
    )
    report.add(
        "transactions for a segment", Figure(took.transactions / done, "1", note="PostgreSQL's own count")
    )
    report.add(
        "written by PostgreSQL for a segment",
        Figure(took.wal / done / 1024, "KiB", note="its log, before it is compressed"),
    )
