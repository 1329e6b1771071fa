"""The broker's queues: how much waits in each, and whether a worker takes from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from watchstep_services.checks.finding import CheckFinding, failed
from watchstep_services.core.settings import Settings
from watchstep_services.scheduler.messages import QUEUE, URGENT

_ANSWER_SECONDS = 2.0
_IMPATIENT = {"max_retries": 1, "interval_start": 0, "socket_timeout": 5.0, "socket_connect_timeout": 5.0}


def check_queues(settings: Settings) -> Iterator[CheckFinding]:
    """Ask workers which queues they take from, and Redis how much waits. The broker is known to answer.

    Where no worker runs and nothing waits, that is in order: the service is not started. A worker that does not answer within two
    seconds is not seen.
    """
    if not settings.broker_url:
        return
    try:
        takers, waiting = _asked(settings)
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        yield failed("queues", error, "see that Redis runs, and its log")
        return
    for queue in (QUEUE, URGENT):
        yield _found(queue, takers[queue], waiting[queue], workers=takers.total() > 0)


def _asked(settings: Settings) -> tuple[Counter[str], dict[str, int]]:
    """Of each queue the workers that take from it, and what waits in it."""
    from watchstep_services.scheduler.celery_client import make_celery

    celery = make_celery(settings)
    celery.conf.broker_transport_options = {**celery.conf.broker_transport_options, **_IMPATIENT}
    with celery, celery.connection_for_write() as connection:
        answers = celery.control.inspect(timeout=_ANSWER_SECONDS, connection=connection).active_queues() or {}
        client: Any = connection.default_channel.client
        waiting = {queue: int(client.llen(queue)) for queue in (QUEUE, URGENT)}
    return Counter(queue["name"] for queues in answers.values() for queue in queues), waiting


def _found(queue: str, takers: int, waiting: int, *, workers: bool) -> CheckFinding:
    what = f"queue {queue}"
    if takers:
        return CheckFinding(
            what, "ok", f"{waiting} wait, {takers} {'worker takes' if takers == 1 else 'workers take'}"
        )
    if workers:
        hint = (
            "those that run are of an earlier version, or take from chosen queues: start a `watchstep worker`"
        )
        return CheckFinding(what, "warning", f"{waiting} wait, and no worker takes from it", hint)
    if waiting:
        return CheckFinding(
            what, "warning", f"{waiting} wait, and no worker answers", "start a `watchstep worker`"
        )
    return CheckFinding(what, "ok", "empty; no worker answers")
