"""Units of work that threads and Celery tasks share, and turns of periodic tasks.

A turn of a periodic message is decided by the broker's clock, so that accumulated messages are skipped. Celery could let messages
expire, but by the clocks of two machines: a worker with a clock ahead of the scheduler's would drop all of them.
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
    """Evaluate the run that has been due for longest, among this worker's candidates; the given run if none is due.

    Then execute or hand out the actions that it caused, and advance the run's lifecycle.

    Raises:
        StoreError, ConfigError: as raised by `evaluate`.
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
            do_action(service, action_id)  # at once, because a message would wait behind earlier messages
    if result.outcome == "committed" and not result.steady:
        advance_run(service, run_id)
    return result


def do_action(service: Service, action_id: int) -> AttemptResult | None:
    """Try an action; after a stop, advance the run's lifecycle."""
    result = dispatch(service, action_id)
    if result is not None and result.facts is not None:
        with service.database.read() as session:
            run_id = session.execute(select(ActionRow.run_id).filter_by(id=action_id)).scalar_one()
        advance_run(service, run_id)
    return result


def do_backtest(service: Service, number: int) -> None:
    """Evaluate the next run of a backtest; hand out the next one behind other due work."""
    if judge_next(service, number):
        service.notifier.backtest_due(number)


_FULL = 100
_SHORT_TIMEOUTS = {
    "max_retries": 1,
    "interval_start": 0,
    "socket_timeout": 0.5,
    "socket_connect_timeout": 0.5,
}
"""Celery's own connections wait six seconds for a broker that refuses, and indefinitely for one that does not answer."""

_log = logging.getLogger(__name__)


def take_turn(celery: Celery, name: str, seconds: float) -> bool:
    """Whether a periodic task is due; true for the first caller in each interval.

    It is also true if the broker does not answer, or has lost its data, because an additional execution does no harm.
    """
    least = max(1, int(seconds * 500))  # half the interval, because the scheduler is not exactly regular
    try:
        with _client_of(celery) as client:
            return bool(client.set(f"watchstep-turn:{name}", 1, nx=True, px=least))
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        _log.warning("%s: the broker does not answer whether it is due (%s); it is done", name, error)
        return True


def is_full(celery: Celery, queue: str) -> bool:
    """Whether so many messages wait in a queue that more would only delay the messages behind them."""
    try:
        with _client_of(celery) as client:
            return int(client.llen(queue)) >= _FULL
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("queue %s: the broker does not answer how many messages wait (%s)", queue, error)
        return False


@contextmanager
def _client_of(celery: Celery) -> Iterator[Any]:
    """A client of the broker with short timeouts, because a sweep works without the broker."""
    pool = pools.connections[celery.connection_for_write(transport_options=_SHORT_TIMEOUTS)]
    with pool.acquire(block=True) as connection:
        yield connection.default_channel.client
