"""What Celery's processes do at their start and end beside their tasks: log, figures, traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.signals import (
    beat_init,
    celeryd_after_setup,
    setup_logging,
    worker_process_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
)

from watchstep_services.core.process import forget_folder, settle_collector
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import logs, tracing
from watchstep_services.core.telemetry.exposition import registry, serve
from watchstep_services.scheduler.messages import URGENT, queue_of

worker_name = ""
"""Of the worker that this process is or was forked from; empty elsewhere."""

_ends: list[Callable[[], None]] = []


def connect() -> None:
    """Have Celery call these; safe to repeat."""
    setup_logging.connect(_log)
    celeryd_after_setup.connect(_own_queue)
    worker_ready.connect(_forked)
    worker_process_init.connect(_child)
    worker_process_shutdown.connect(_child_ends)
    worker_shutdown.connect(_main_process_ends)
    beat_init.connect(_beat)


def _log(**_signal: Any) -> None:
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)


def _own_queue(sender: str, instance: Any, **_signal: Any) -> None:
    """A worker also takes the messages of actions, and of runs whose earlier rows it holds."""
    global worker_name  # noqa: PLW0603 - a process is one worker, and its tasks have nothing else to know it by
    worker_name = sender
    instance.app.amqp.queues.select_add(URGENT)
    instance.app.amqp.queues.select_add(queue_of(sender))


def _forked(**_signal: Any) -> None:
    _ends.append(serve(load_settings(), registry()))


def _child(**_signal: Any) -> None:
    tracing.start("worker")
    settle_collector()


def _child_ends(**_signal: Any) -> None:
    tracing.stop()


def _main_process_ends(**_signal: Any) -> None:
    while _ends:
        _ends.pop()()
    forget_folder()


def _beat(**_signal: Any) -> None:
    _ends.append(serve(load_settings(), registry()))
