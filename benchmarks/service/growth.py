"""What an evaluation and a sweep cost, and how that grows with the runs that there are.

Most runs are virtual: rows in the database of runs that go on and announce. One really sends, in this process, so that CPU
is its own; PostgreSQL's is told beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from sqlalchemy import event, insert

from benchmarks.report import Figure, Report
from benchmarks.service.load import PERIOD, STEPS
from benchmarks.service.servers import cpu_of
from benchmarks.service.simulated import LAYERS, Segments
from tests.services.postgres import running_postgres
from watchstep.format import documents, layout
from watchstep.format.control import ControlDocument
from watchstep.format.documents import AttemptDocument, RunDocument
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_services.core.settings import NANOSECONDS, load_settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.db.records import hint, put_segments
from watchstep_services.db.schema import upgrade
from watchstep_services.runs.registration import register
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.scheduler.work import evaluate_longest_due
from watchstep_services.service.context import Service

SIZES, QUICK_SIZES = (10, 100, 1_000, 10_000), (10, 1_000)
_LATER_NS = 3600 * NANOSECONDS


@dataclass(frozen=True)
class Cost:
    """Of one evaluation and one sweep: milliseconds of this process, of PostgreSQL, and queries."""

    evaluation: float
    database: float
    queries: float
    sweep: float
    sweep_queries: float


@dataclass
class Sample:
    """A service in this process, with one run that really sends."""

    service: Service
    run_id: int
    store: Store
    segments: Segments
    postmaster: int
    queries: int = 0
    seq: int = 0

    def send(self) -> int:
        """Write the next segment; returns its bytes."""
        data = self.segments.good[self.seq]
        first = self.seq * STEPS
        key = SegmentKey(WriterId("a1", "node", "w0"), self.seq, first, first + STEPS - 1)
        self.store.put(key.path, data)
        with self.service.database.write() as session:
            put_segments(session, self.run_id, [key], read_clock(session))
            hint(session, self.run_id, requested=True)
        self.seq += 1
        return len(data)


@contextmanager
def _sample(number: int) -> Iterator[Sample]:
    with (
        running_postgres() as postgres,
        postgres.new_database() as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        database = open_database(url)
        upgrade(database)
        root = Store.open(folder, create=True)
        settings = load_settings(store=root.location, listing_seconds=30.0)
        service = Service(settings, database, "http://service.test", DEFAULT_RULES)
        store = root.child(layout.run_prefix("sample", "r"))
        store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument("sample", "r", 1)))
        store.create(layout.attempt_document("a1"), documents.encode(AttemptDocument("a1", 1, 1, "raise")))
        run_id = register(service, "sample", "r", (), "recorder")
        with database.read() as session:
            backend = session.connection().exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        sample = Sample(service, run_id, store, Segments(STEPS, number), psutil.Process(backend).ppid())

        def count(*_asked: Any) -> None:
            sample.queries += 1

        event.listen(database.engine, "before_cursor_execute", count)
        try:
            yield sample
        finally:
            database.close()


def _add_virtual(database: Database, first: int, until: int) -> None:
    """Runs that go on: as the database has them, with a look far ahead, for they announce."""
    with database.write() as session:
        now = read_clock(session)
        runs = [
            {
                "project": "sample", "run": f"virtual-{number}", "state": "running", "attempt": "a1",
                "control": ControlDocument().as_data(), "health": {}, "created_ns": now, "last_seen_ns": now,
                "listed_ns": now, "poll_ns": now + _LATER_NS, "poll_interval_ns": 30 * NANOSECONDS,
            }
            for number in range(first, until)
        ]  # fmt: skip
        ids = list(session.execute(insert(RunRow).returning(RunRow.id), runs).scalars())
        attempts = [
            {
                "run_id": run_id, "attempt": "a1", "world_size": 1, "first_seen_ns": now, "largest": 99, "watermark": 99,
                "writers": {}, "ends": {}, "context": list(range(40)), "ticks": 25, "journaled": 0,
            }
            for run_id in ids
        ]  # fmt: skip
        session.execute(insert(Attempt), attempts)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def _measure(sample: Sample, rounds: int) -> Cost:
    took, asked, before = 0.0, 0, cpu_of(sample.postmaster)
    for _ in range(rounds):
        sample.send()
        sample.queries, since = 0, time.process_time()
        evaluate_longest_due(sample.service, sample.run_id)
        took += time.process_time() - since
        asked += sample.queries
    database = cpu_of(sample.postmaster) - before
    sweep(sample.service)
    sample.queries, since = 0, time.process_time()
    for _ in range(rounds):
        sweep(sample.service)
    swept, swept_asked = time.process_time() - since, sample.queries
    each = 1000 / rounds
    return Cost(took * each, database * each, asked / rounds, swept * each, swept_asked / rounds)


def add_growth_figures(report: Report, *, quick: bool) -> None:
    """By virtual runs."""
    sizes, rounds = (QUICK_SIZES, 8) if quick else (SIZES, 30)
    found: dict[int, Cost] = {}
    with _sample(10 + rounds * len(sizes)) as sample:
        for _ in range(10):  # connections, caches and the rules' history as they are in a run that goes on
            size = sample.send()
            evaluate_longest_due(sample.service, sample.run_id)
        there = 1
        for number in sizes:
            _add_virtual(sample.service.database, there, number)
            there = number
            found[number] = _measure(sample, rounds)
    first, last = found[sizes[0]], found[sizes[-1]]
    hours = 3600 / PERIOD
    note = f"{7 * LAYERS + 3} tensors x {STEPS} steps, {size / 1024:.0f} KiB, {len(DEFAULT_RULES)} rules"
    report.add("an evaluation, CPU of the worker", Figure(first.evaluation, "ms", note=note))
    report.add(
        "an evaluation, CPU of PostgreSQL", Figure(first.database, "ms", note="the announcement's included")
    )
    report.add("an evaluation, queries", Figure(first.queries, "1"))
    report.add(
        "a run-hour, CPU",
        Figure((first.evaluation + first.database) * hours / 1000, "s", note="without the API"),
    )
    report.add("a run-hour, queries", Figure(first.queries * hours, "1"))
    report.add("a run-hour, read from the store", Figure(size * hours / 2**20, "MiB"))
    for number, cost in found.items():
        told = f"{cost.queries:.0f} queries; PostgreSQL {cost.database:.1f} ms"
        report.add(f"{number} runs: an evaluation", Figure(cost.evaluation, "ms", note=told))
        report.add(
            f"{number} runs: a sweep", Figure(cost.sweep, "ms", note=f"{cost.sweep_queries:.0f} queries")
        )
    report.add(
        f"an evaluation among {sizes[-1]} runs, to one among {sizes[0]}",
        Figure(last.evaluation / first.evaluation, "ratio", 1.5),
    )
