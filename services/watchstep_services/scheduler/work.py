"""Pieces of work that threads and Celery tasks share, and turns between them.

The turn of a message that is sent again and again goes by the broker's clock: messages that piled up are skipped. Celery could let them expire, by
the clocks of two machines: a worker whose clock is ahead of the scheduler's would drop all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import pools
from sqlalchemy import select

from watchstep_services.core.due_action import AttemptResult
from watchstep_services.db.models import ActionRow
from watchstep_services.dispatch.dispatch import dispatch, posts_of
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.evaluation.backtests import judge_next
from watchstep_services.evaluation.evaluate import Evaluation
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.service.context import Service


def evaluate_longest_due(service: Service, run_id: int) -> Evaluation:
    """Evaluate the run that has been due for longest, of those that this worker is to take; the one named if none is.

    What it caused is passed on, and the run's life is followed.

    Raises:
        StoreError, ConfigError: as `evaluate`.
    """
    return _followed_up(service, *evaluating.evaluate_longest_due(service, run_id))


def _followed_up(service: Service, run_id: int, result: Evaluation) -> Evaluation:
    posts = posts_of(service, result.actions)
    for action_id, post in posts.items():
        service.notifier.action_due(action_id, post)
    if result.more:
        service.notifier.run_changed(run_id, service.worker)
    for action_id in result.actions:
        if action_id not in posts:
            do_action(service, action_id)  # at once: a message would wait behind those that wait already
    if result.outcome == "committed" and not result.steady:
        advance_run(service, run_id)
    return result


def do_action(service: Service, action_id: int) -> AttemptResult | None:
    """Try an action; after a stop, follow the run's life."""
    tried = dispatch(service, action_id)
    if tried is not None and tried.facts is not None:
        with service.database.read() as session:
            run_id = session.execute(select(ActionRow.run_id).filter_by(id=action_id)).scalar_one()
        advance_run(service, run_id)
    return tried


def do_backtest(service: Service, number: int) -> None:
    """Judge the next run of a backtest, and have the others judged after whatever else is due."""
    if judge_next(service, number):
        service.notifier.backtest_due(number)


_ENOUGH = 100
_IMPATIENT = {"max_retries": 1, "interval_start": 0, "socket_timeout": 0.5, "socket_connect_timeout": 0.5}
"""Celery's own connections wait six seconds for a broker that refuses, and for ever for one that says nothing."""

_log = logging.getLogger(__name__)


def take_turn(celery: Celery, name: str, seconds: float) -> bool:
    """Whether it is time to do something that shall be done every so many seconds, by whoever comes first.

    A broker that does not answer, or has forgotten, says yes: once too often does no harm.
    """
    least = max(1, int(seconds * 500))  # half of it: the scheduler is never quite regular
    try:
        with _asking(celery) as client:
            return bool(client.set(f"watchstep-turn:{name}", 1, nx=True, px=least))
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        _log.warning("%s: the broker cannot be asked whose turn it is (%s); it is done", name, error)
        return True


def enough_wait(celery: Celery, queue: str) -> bool:
    """Whether so many messages wait in a queue that more would only make it longer, and whatever comes behind them late."""
    try:
        with _asking(celery) as client:
            return int(client.llen(queue)) >= _ENOUGH
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("queue %s: the broker cannot be asked how much waits in it (%s)", queue, error)
        return False


@contextmanager
def _asking(celery: Celery) -> Iterator[Any]:
    """A client of the broker that gives up soon: a sweep does without it."""
    kept = pools.connections[celery.connection_for_write(transport_options=_IMPATIENT)]
    with kept.acquire(block=True) as connection:
        yield connection.default_channel.client
