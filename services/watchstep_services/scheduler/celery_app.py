"""Celery's application with its tasks, for workers: ``celery -A watchstep_services.scheduler.celery_app worker``.

Tasks are hints: they carry an id, and what is to be done stands in the database. A task that is lost is found by the
sweep, one that comes twice finds nothing to do.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace

from celery.signals import worker_process_shutdown

from watchstep.errors import WatchstepError
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import load_settings
from watchstep_services.retention.upkeep import UpkeepThreads
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
from watchstep_services.scheduler.sweep import Work, find_due, note_asked
from watchstep_services.scheduler.sweep import sweep as look_for_work
from watchstep_services.scheduler.work import enough_wait, take_turn
from watchstep_services.service.context import Service

UPKEEP_AT_ONCE = 4
_POSTS_AT_ONCE = 4

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def _service_of(process: int) -> Service:  # noqa: ARG001 - the cache's key: a forked child opens its own
    return replace(production_service(load_settings(), app), worker=celery_client.worker_name)


def service() -> Service:
    """This process's view of the service."""
    return _service_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _actions_in(process: int) -> WorkQueue:  # noqa: ARG001 - as above: threads do not outlive a fork
    actions = WorkQueue(_POSTS_AT_ONCE)
    actions.start(service())
    worker_process_shutdown.connect(lambda **_signal: actions.close(), weak=False)
    return actions


@functools.lru_cache(maxsize=1)
def _upkeep_in(process: int) -> UpkeepThreads:  # noqa: ARG001 - as above
    threads = UpkeepThreads(service(), UPKEEP_AT_ONCE)
    worker_process_shutdown.connect(lambda **_signal: threads.close(), weak=False)
    return threads


@app.task(name=EVALUATE)  # type: ignore[untyped-decorator]
def evaluate_run(run_id: int) -> None:
    """Evaluate the run that has been due for longest; the message only says that there is one."""
    try:
        work.evaluate_longest_due(service(), run_id)
    except WatchstepError as error:
        _log.warning("run %d: %s", run_id, error)


@app.task(name=DISPATCH)  # type: ignore[untyped-decorator]
def dispatch_action(action_id: int) -> None:
    """Have an action tried by threads: a receiver or a backend that hangs keeps no evaluation and no other stop waiting.

    Its message is acknowledged before: what such a thread does not come to, a sweep finds.
    """
    _actions_in(os.getpid()).action_due(action_id)


@app.task(name=BACKTEST)  # type: ignore[untyped-decorator]
def judge_backtest(number: int) -> None:
    """Judge the next run of a backtest."""
    work.do_backtest(service(), number)


@app.task(name=SWEEP)  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Look for work, and hand it out."""
    mine = service()
    if not take_turn(app, SWEEP, mine.settings.sweep_seconds):
        return
    # What the database knows of does not wait until every silent run has been looked at.
    due = find_due(mine)
    _hand_out(mine, due)
    work = look_for_work(mine)
    failpoint("sweep.found", work)
    _hand_out(mine, work.without(due))
    failpoint("sweep.handed_out", work)


def _hand_out(mine: Service, work: Work) -> None:
    # Messages only wake workers. Where many wait, all are awake, and a sweep a second later asks for what is still due.
    if work.runs and not enough_wait(app, QUEUE):
        note_asked(mine, work.runs)
        for run_id in work.runs:
            mine.notifier.run_changed(run_id)
    if work.actions and not enough_wait(app, URGENT):
        for action_id in work.actions:
            mine.notifier.action_due(action_id)
    for number in work.backtests:
        mine.notifier.backtest_due(number)


@app.task(name=UPKEEP)  # type: ignore[untyped-decorator]
def upkeep() -> None:
    """Have threads compact and clear away what is due of ended runs: a few at a time, so that evaluations get their turn."""
    if take_turn(app, UPKEEP, service().settings.upkeep_seconds):
        _upkeep_in(os.getpid()).start()
