"""Restarts of ``watchstep worker`` after an error that ends Celery's worker.

Celery connects again after most losses of its broker. If an outage is short and messages are unacknowledged, its Redis transport may
instead fail with an `AttributeError` while it closes the lost connection, and the worker ends with exit code 1. Then this process executes
its program again, as Celery does at SIGHUP: the process id and the command line stay, and nothing of the broken worker is left.

    starting ──> ready ──> error ──> delay ──> starting, as a restart
       │           │                   │
       │           └─ signal ──> end   └─ signal ──> end
       └─ error ──> end, unless it is a restart

An error before the first worker is ready is one of the installation, such as a wrong URL, and ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from watchstep.errors import WatchstepError
from watchstep_services.core.process import forget_folder

_log = logging.getLogger(__name__)

_RESTARTS = "_WATCHSTEP_WORKER_RESTARTS"
"""Variable with the number of restarts so far. Its prefix is not that of settings."""

_LONGEST_DELAY = 60.0
_SETTLED_SECONDS = 300.0
"""After this time, an error is not a consequence of the one before."""


class WorkerLife:
    """One execution of the program as a worker.

    Args:
        restarts: number of restarts before.
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._started = time.monotonic()
        self._is_ready = False
        self._is_stopping = False

    def connect(self) -> None:
        """Connect the signals of Celery. They are imported here, because a command with invalid settings does not import Celery."""
        from celery.signals import worker_ready, worker_shutting_down

        worker_ready.connect(self._ready, weak=False)
        worker_shutting_down.connect(self._stopping, weak=False)

    def _ready(self, **_signal: Any) -> None:
        self._is_ready = True

    def _stopping(self, **_signal: Any) -> None:
        """Note SIGTERM, SIGINT or SIGQUIT. Celery sends nothing at an error."""
        self._is_stopping = True

    @property
    def is_restarted_after_errors(self) -> bool:
        """Whether an error now leads to a restart."""
        return (self._is_ready or self._restarts > 0) and not self._is_stopping

    def restart(self) -> NoReturn:
        """Execute the program again after a delay. A signal during the delay ends the process.

        Raises:
            SystemExit: a signal arrived.
        """
        if time.monotonic() - self._started >= _SETTLED_SECONDS:
            self._restarts = 0
        delay = delay_before(self._restarts)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, _end)
        if self._is_stopping:  # Celery's handler received a signal before it was replaced
            raise SystemExit(0)
        _log.error("the worker has ended by an error; it starts again in %.0f s", delay)
        time.sleep(delay)
        forget_folder()  # the program creates another one
        os.environ[_RESTARTS] = str(self._restarts + 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this program again


def run_with_restarts(work: Callable[[WorkerLife], None]) -> None:
    """Run a worker, and execute the program again after an error that ended it.

    Args:
        work: runs the worker until it ends; connects the life's signals first.

    Raises:
        SystemExit, Exception: as ``work``, if it is not restarted.
    """
    life = WorkerLife(int(os.environ.pop(_RESTARTS, "0")))
    try:
        work(life)
    except SystemExit as ended:
        if not ended.code or not life.is_restarted_after_errors:
            raise
    except Exception as error:
        if not life.is_restarted_after_errors:
            raise
        _log.error("%s", error, exc_info=not isinstance(error, WatchstepError))
    else:
        return
    life.restart()


def delay_before(restarts: int) -> float:
    """Return the delay before the next restart in seconds: one second, doubled with each restart in a row, at most a minute."""
    return min(_LONGEST_DELAY, 2.0 ** min(restarts, 10))


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(0)
