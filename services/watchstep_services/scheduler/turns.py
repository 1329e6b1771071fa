"""Turns of what the scheduler sends again and again, by the broker's clock: what piled up is passed over, and not added to.

Celery could let such messages expire, by the clocks of the two machines: a worker whose clock is ahead of the scheduler's
would throw all of them away, and nothing would be looked for any more.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery

_ENOUGH = 100

_log = logging.getLogger(__name__)


def take_turn(celery: Celery, name: str, seconds: float) -> bool:
    """Whether it is time to do something that shall be done every so many seconds, by whoever comes first.

    A broker that does not answer, or has forgotten, says yes: once too often does no harm.
    """
    least = max(1, int(seconds * 500))  # half of it: the scheduler is never quite regular
    try:
        with celery.connection_or_acquire() as connection:
            client: Any = connection.default_channel.client
            return bool(client.set(f"watchstep-turn:{name}", 1, nx=True, px=least))
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        _log.warning("%s: the broker cannot be asked whose turn it is (%s); it is done", name, error)
        return True


def enough_wait(celery: Celery, queue: str) -> bool:
    """Whether so many messages wait in a queue that more would only make it longer, and whatever comes behind them late."""
    try:
        with celery.connection_or_acquire() as connection:
            client: Any = connection.default_channel.client
            return int(client.llen(queue)) >= _ENOUGH
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("queue %s: the broker cannot be asked how much waits in it (%s)", queue, error)
        return False
