"""Celery's application without its tasks: for whoever sends messages or asks workers how they are, and for beat.

It loads nothing of what evaluates; `celery_app` adds the tasks to it.
"""

from __future__ import annotations

from celery import Celery

from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.scheduler import celery_processes
from watchstep_services.scheduler.messages import QUEUE, SWEEP, UPKEEP


def make_celery(settings: Settings) -> Celery:
    """A Celery application for these settings."""
    celery = Celery("watchstep", broker=settings.broker_url.get_secret_value() or None)
    celery.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
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


app = make_celery(load_settings())
celery_processes.connect()
