"""Turns of periodic Celery tasks, wake-ups of workers, and the length of queues. `watchstep serve` does not import this module.

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


_WAKE_MS = 5000
"""Time after which a message that wakes a worker counts as lost."""


def request_wake(celery: Celery, queue: str) -> bool:
    """Whether to send a message that wakes the workers of a queue: not while an earlier one waits there.

    A worker that takes the message calls `note_awake` before it looks for work, so the earlier message covers everything that was
    committed before this call. It is also true if the broker does not answer.
    """
    try:
        with _client_of(celery) as client:
            return bool(client.set(f"watchstep-wake:{queue}", 1, nx=True, px=_WAKE_MS))
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        _log.warning("queue %s: the broker does not answer whether a message waits (%s)", queue, error)
        return True


def note_awake(celery: Celery, queue: str) -> None:
    """Record that a worker has taken the message of a queue and now looks for work, so that new work sends another."""
    try:
        with _client_of(celery) as client:
            client.delete(f"watchstep-wake:{queue}")
    except Exception as error:  # noqa: BLE001 - as above; the record expires
        _log.warning("queue %s: the broker does not answer (%s)", queue, error)


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
