"""The service in production's processes: PostgreSQL, and Celery for hints."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from watchstep_services.core.due_action import DeliveryKey
from watchstep_services.core.settings import Settings, require_production
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.scheduler.celery_client import BACKTEST, DISPATCH, EVALUATE, QUEUE, URGENT, queue_of
from watchstep_services.scheduler.turns import request_wake
from watchstep_services.service.context import Service, owner_receivers, owner_rules

_WAITING_HINTS = 1000
_WORKER_SECONDS = 60
"""Expiry of a message to one worker. If that worker is gone, a sweep has notified the others long before."""

_log = logging.getLogger(__name__)


class CeleryNotifier:
    """Sends hints as Celery messages from its own thread, so that announcements do not wait for the broker.

    A message about a run only wakes a worker, which then evaluates all runs that are due. So a queue has one such message at a time.
    If the broker does not answer, hints are dropped and the sweep finds the work.
    """

    def __init__(self, celery: Any) -> None:
        self._celery = celery
        self._hints: queue.Queue[tuple[str, int, dict[str, Any]]] = queue.Queue(_WAITING_HINTS)
        threading.Thread(target=self._forward, name="watchstep-hints", daemon=True).start()

    def run_changed(self, run_id: int, worker: str = "") -> None:
        """Have a run evaluated, by the worker that has cached its earlier rows if there is one."""
        self._put(
            EVALUATE,
            run_id,
            {"queue": queue_of(worker), "expires": _WORKER_SECONDS} if worker else {"queue": QUEUE},
        )

    def action_due(self, action_id: int, post: DeliveryKey | None = None) -> None:  # noqa: ARG002 - the worker looks it up
        """Have an action tried."""
        self._put(DISPATCH, action_id, {"queue": URGENT})

    def backtest_due(self, number: int) -> None:
        """Have the next run of a backtest evaluated."""
        self._put(BACKTEST, number, {})

    def _put(self, task: str, number: int, where: dict[str, Any]) -> None:
        try:
            self._hints.put_nowait((task, number, where))
        except queue.Full:
            metrics.HINTS_DROPPED.inc()
            _log.warning(
                "hint for %s %d dropped, the sweep will find it: the broker is too slow", task, number
            )

    def _forward(self) -> None:
        while True:
            task, number, where = self._hints.get()
            try:
                if task == EVALUATE and not request_wake(self._celery, where["queue"]):
                    continue
                self._celery.send_task(task, args=[number], retry=False, ignore_result=True, **where)
            except Exception as error:  # noqa: BLE001 - any error of the broker's client; the thread continues
                metrics.HINTS_DROPPED.inc()
                _log.warning("hint for %s %d dropped, the sweep will find it: %s", task, number, error)


def production_service(settings: Settings, celery: Any) -> Service:
    """Create the service of one process. It must be called after a fork.

    Raises:
        ConfigError: a setting that production needs is missing, or the database does not answer.
    """
    require_production(settings)
    database = open_encrypted_database(settings)
    database.check()
    base = settings.public_url.rstrip("/") or f"http://{settings.host}:{settings.port}"
    return Service(
        settings, database, base, owner_rules(settings), CeleryNotifier(celery), local_jobs=settings.local_jobs,
        receiver_file=owner_receivers(settings),
    )  # fmt: skip
