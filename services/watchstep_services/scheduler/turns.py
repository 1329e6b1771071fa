"""Turns of what the scheduler sends again and again, by the broker's clock: what piled up is passed over, and not added to.

Celery could let such messages expire, by the clocks of the two machines: a worker whose clock is ahead of the scheduler's
would throw all of them away, and nothing would be looked for any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import pools

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
