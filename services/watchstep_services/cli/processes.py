"""``watchstep api``, ``watchstep worker``, ``watchstep scheduler``: the processes of a production service.

Each checks its settings and the schema of the database, then works in the same process, so that it receives signals directly and
a supervisor watches it without an intermediate process. Imports follow the check of the settings, and are limited to the command.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from watchstep_services.cli.worker_restarts import WorkerLife, run_with_restarts
from watchstep_services.core.process import raise_file_limit, share_figures
from watchstep_services.core.settings import Settings, load_settings, require_production, warn_of_unknown
from watchstep_services.core.telemetry import logs

_MODULES = "watchstep_services.scheduler"


def api(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: WATCHSTEP_HOST, or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on. Default: WATCHSTEP_PORT, or 8642.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that share the port.")] = 1,
) -> None:
    """Run the API of a production service. On SIGTERM, finishes running requests and exits.

    Examples:
        watchstep api --host 0.0.0.0 --processes 4
    """
    settings = _checked()
    share_figures()
    from watchstep_services.api.production import main

    main(host or settings.host, settings.port or 8642 if port is None else port, processes)


def worker(
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of concurrent tasks. Default: WATCHSTEP_WORKER_PROCESSES."),
    ] = None,
) -> None:
    """Run a worker of a production service: evaluates runs and delivers actions. On SIGTERM, finishes running tasks and exits.

    After an error that ends it, the worker starts again in the same process.

    Examples:
        watchstep worker --processes 8
    """
    run_with_restarts(functools.partial(_work, processes))


def _work(processes: int | None, life: WorkerLife) -> None:
    settings = _checked()
    share_figures()
    from watchstep_services.db.encryption import open_encrypted_database
    from watchstep_services.db.schema import prepare
    from watchstep_services.runs.rule_configs import apply_owner_rules
    from watchstep_services.service.context import owner_receivers, owner_rules

    rules = owner_rules(settings)
    owner_receivers(settings)
    database = open_encrypted_database(settings)
    try:
        prepare(database, settings)
        apply_owner_rules(database, rules)
    finally:
        database.close()
    life.connect()
    count = str(processes or settings.worker_processes)
    # Workers coordinate through the database only, so that gossip would only load the broker.
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    _celery("celery_app", "worker", "--concurrency", count, "--loglevel", settings.log_level, *quiet)


def scheduler(
    schedule: Annotated[
        Path, typer.Option(help="File with the times of the last messages. It may be deleted.")
    ] = Path("beat-schedule"),
) -> None:
    """Run the scheduler of a production service, which sends periodic tasks to the workers. Run exactly one.

    Examples:
        watchstep scheduler
    """
    settings = _checked()
    file = ["--schedule", str(schedule), "--pidfile="]
    _celery("celery_client", "beat", *file, "--loglevel", settings.log_level)


def _checked() -> Settings:
    raise_file_limit()
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)
    logging.captureWarnings(capture=True)
    warn_of_unknown(os.environ)
    require_production(settings)
    return settings


def _celery(module: str, *arguments: str) -> None:
    from celery.bin.celery import celery

    # Suppress the banner and the farewell message, which are not log lines. Celery bypasses sys.stdout for the latter.
    with Path(os.devnull).open("w", encoding="utf-8") as null:
        setattr(sys, "__stdout__", null)  # noqa: B010 - typed as final
        celery(
            ["--quiet", "-A", f"{_MODULES}.{module}", *arguments],
            prog_name="celery",
            auto_envvar_prefix="CELERY",
        )
