"""The Celery application without its tasks, and the names of messages, queues and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
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
from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.core.telemetry import logs, tracing
from watchstep_services.core.telemetry.metrics import registry, serve

EVALUATE = "watchstep.evaluate"
DISPATCH = "watchstep.dispatch"
BACKTEST = "watchstep.backtest"
SWEEP = "watchstep.sweep"
UPKEEP = "watchstep.upkeep"
QUEUE = "watchstep"
URGENT = "watchstep.urgent"
"""Queue of actions, including stops. Workers alternate between it and the other queues."""


_START_SECONDS = 60.0
"""Time in which a process of a worker has to start. After Celery's own 4 s, it kills a process that starts slowly on a busy machine, and its
successor as well, without end."""


def queue_of(worker: str) -> str:
    """The queue of one worker, from which only it takes messages."""
    return f"{QUEUE}.{worker}"


def make_celery(settings: Settings) -> Celery:
    """Create the Celery application for these settings."""
    celery = Celery("watchstep", broker=settings.broker_url.get_secret_value() or None)
    celery.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        worker_proc_alive_timeout=_START_SECONDS,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": 60 + int(settings.lease_seconds)},
        beat_schedule={
            "sweep": {
                "task": SWEEP,
                "schedule": settings.sweep_seconds,
            },
            "upkeep": {
                "task": UPKEEP,
                "schedule": settings.upkeep_seconds,
            },
        },
    )
    return celery


worker_name = ""
"""Name of the worker that this process is or was forked from; empty for other processes."""

_ends: list[Callable[[], None]] = []


def connect() -> None:
    """Connect Celery's signals; safe to repeat."""
    setup_logging.connect(_set_up_logging)
    celeryd_after_setup.connect(_own_queue)
    worker_ready.connect(_forked)
    worker_process_init.connect(_child)
    worker_process_shutdown.connect(_child_ends)
    worker_shutdown.connect(_main_process_ends)
    beat_init.connect(_beat)


def _set_up_logging(**_signal: Any) -> None:
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)


def _own_queue(sender: str, instance: Any, **_signal: Any) -> None:
    """Subscribe a worker to messages of actions, and of runs with earlier rows that it has cached."""
    global worker_name  # noqa: PLW0603 - a process has one worker, and its tasks have no other access to the name
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


app = make_celery(load_settings())
connect()
