"""Celery's application with its tasks, for workers: ``celery -A watchstep_services.scheduler.celery_app worker``.

Tasks are hints: they carry an id, and the work itself is described in the database. The sweep finds the work of a lost task, and a
duplicate task finds nothing to do.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from typing import Any

from celery.signals import worker_process_shutdown

from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import load_settings
from watchstep_services.retention import UpkeepThreads
from watchstep_services.scheduler import celery_client, work
from watchstep_services.scheduler.celery_client import (
    BACKTEST,
    DISPATCH,
    EVALUATE,
    QUEUE,
    SWEEP,
    UPKEEP,
    URGENT,
    app,
)
from watchstep_services.scheduler.production import production_service
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.sweep import Work, find_due, note_requested
from watchstep_services.scheduler.sweep import sweep as look_for_work
from watchstep_services.scheduler.turns import is_full, note_awake, take_turn
from watchstep_services.service.context import Service

UPKEEP_AT_ONCE = 4
_WAKE_SECONDS = 0.5
"""Time for which a worker evaluates runs before it takes the next message."""
_POSTS_AT_ONCE = 4


@functools.lru_cache(maxsize=1)
def _service_of(process: int) -> Service:  # noqa: ARG001 - the cache's key: a forked child creates its own
    return replace(production_service(load_settings(), app), worker=celery_client.worker_name)


def service() -> Service:
    """The service of this process."""
    return _service_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _threads_in(process: int) -> WorkQueue:  # noqa: ARG001 - as above, because threads do not survive a fork
    threads = WorkQueue(_POSTS_AT_ONCE)
    threads.start(service())
    worker_process_shutdown.connect(lambda **_signal: threads.close(), weak=False)
    return threads


@functools.lru_cache(maxsize=1)
def _upkeep_in(process: int) -> UpkeepThreads:  # noqa: ARG001 - as above
    threads = UpkeepThreads(service(), UPKEEP_AT_ONCE)
    worker_process_shutdown.connect(lambda **_signal: threads.close(), weak=False)
    return threads


@app.task(name=EVALUATE, bind=True)  # type: ignore[untyped-decorator]
def evaluate_run(task: Any, run_id: int) -> None:
    """Evaluate runs that are due, for `_WAKE_SECONDS`; the message is only a hint."""
    note_awake(app, (task.request.delivery_info or {}).get("routing_key") or QUEUE)
    process_service = service()
    until = time.monotonic() + _WAKE_SECONDS
    if not work.evaluate_due(process_service, run_id).is_full:
        return
    process_service.notifier.run_changed(
        run_id
    )  # more waits than one worker evaluates at once: wake another one
    while time.monotonic() < until:
        if not work.evaluate_due(process_service).is_full:
            return
    process_service.notifier.run_changed(run_id, process_service.worker)  # after messages of other kinds


@app.task(name=DISPATCH)  # type: ignore[untyped-decorator]
def dispatch_action(action_id: int) -> None:
    """Have threads try an action, so that a hanging receiver or backend delays no evaluation and no other stop.

    The message is acknowledged before the try; a sweep finds actions that the threads do not finish.
    """
    _threads_in(os.getpid()).action_due(action_id)


@app.task(name=BACKTEST)  # type: ignore[untyped-decorator]
def evaluate_backtest(number: int) -> None:
    """Have a thread evaluate the next run of a backtest, which may take minutes, so that it delays no evaluation and no stop.

    The message is acknowledged before; a sweep finds backtests that the threads do not finish.
    """
    _threads_in(os.getpid()).backtest_due(number)


@app.task(name=SWEEP)  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Find due work and hand it out."""
    process_service = service()
    if not take_turn(app, SWEEP, process_service.settings.sweep_seconds):
        return
    # Work that the database lists does not wait for polls of silent runs.
    due = find_due(process_service)
    _hand_out(process_service, due)
    work = look_for_work(process_service)
    failpoint("sweep.found", work)
    _hand_out(process_service, work.without(due))
    failpoint("sweep.handed_out", work)


def _hand_out(service: Service, work: Work) -> None:
    # Messages only wake workers. If many wait, all workers are awake, and the next sweep requests what is still due.
    if work.runs and not is_full(app, QUEUE):
        note_requested(service, work.runs)
        for run_id in work.runs:
            service.notifier.run_changed(run_id)
    if work.actions and not is_full(app, URGENT):
        for action_id in work.actions:
            service.notifier.action_due(action_id)
    for number in work.backtests:
        service.notifier.backtest_due(number)


@app.task(name=UPKEEP)  # type: ignore[untyped-decorator]
def upkeep() -> None:
    """Have threads do due upkeep of ended runs, a few steps at a time, so that evaluations get processor time."""
    if take_turn(app, UPKEEP, service().settings.upkeep_seconds):
        _upkeep_in(os.getpid()).start()
