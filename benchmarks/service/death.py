"""A worker is killed in the middle of an evaluation: how long its run waits for another."""

from __future__ import annotations

import os
import signal
import time

from sqlalchemy import select

from benchmarks.report import Figure, Report
from benchmarks.service.load import PERIOD, STEPS, simulating
from benchmarks.service.servers import Production, production
from benchmarks.service.simulated import Plan
from watchstep_services.db.clock import now_ns
from watchstep_services.db.models import RunRow

LEASE, SWEEP = 10.0, 1.0
RUNS = 40
_TRIES = 200
_PATIENCE_SECONDS = 90.0


def add_death_figures(report: Report, *, quick: bool) -> None:
    """Two workers, of which one is killed while it holds a run."""
    with (
        production(1, 1, lease_seconds=str(LEASE), sweep_seconds=str(SWEEP)) as made,
        made.worker(9, 1) as victim,
    ):
        plan = Plan(
            made.url, made.recorder, made.store, RUNS, PERIOD, STEPS, 5.0, 85.0 if quick else 150.0, 0.0
        )
        with simulating(plan, made.folder):
            time.sleep(15.0)
            waited = [seconds for seconds in [_kill_one(made, victim.pid)] if seconds is not None]
    report.add(
        "worker killed to its run evaluated by another",
        Figure(
            max(waited) if waited else None,
            "s",
            LEASE + SWEEP,
            note=f"a lease of {LEASE:g} s and a sweep every {SWEEP:g} s"
            if waited
            else "it was never caught with a run",
        ),
    )


def _held(made: Production) -> dict[int, int]:
    """Runs that are held, with their epochs."""
    with made.database.read() as session:
        rows = session.execute(
            select(RunRow.id, RunRow.epoch).where(RunRow.lease_until_ns > now_ns())
        ).tuples()
        return dict(rows.all())


def _kill_one(made: Production, victim: int) -> float | None:
    """Stop the worker until it is found holding a run, then kill it; seconds until that run goes on."""
    for _ in range(_TRIES):
        os.killpg(victim, signal.SIGSTOP)
        first = _held(made)
        time.sleep(1.0)  # what the other holds goes on meanwhile
        stuck = [run for run, epoch in _held(made).items() if first.get(run) == epoch]
        if stuck:
            os.killpg(victim, signal.SIGKILL)
            return _until_evaluated(made, stuck[0], time.monotonic())
        os.killpg(victim, signal.SIGCONT)
        time.sleep(0.05)
    return None


def _until_evaluated(made: Production, run_id: int, killed: float) -> float | None:
    with made.database.read() as session:
        ticks = session.get_one(RunRow, run_id).ticks
    while time.monotonic() - killed < _PATIENCE_SECONDS:
        with made.database.read() as session:
            if session.get_one(RunRow, run_id).ticks > ticks:
                return time.monotonic() - killed
        time.sleep(0.1)
    return None
