"""``watchstep api``, ``watchstep worker``, ``watchstep scheduler``: production's processes.

Each checks its settings and the database's schema, and then becomes the program that does the work, in the same process:
signals reach it, and nothing stands between it and whoever watches it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from watchstep_services import logs
from watchstep_services.database.engine import open_database
from watchstep_services.database.schema import prepare
from watchstep_services.exposition import shared_folder
from watchstep_services.scheduler.production import require_production
from watchstep_services.service import owner_rules
from watchstep_services.settings import Settings, load_settings
from watchstep_services.unknown_variables import warn_of_unknown

_CELERY = ["-m", "celery", "-A", "watchstep_services.scheduler.celery_app"]


def api(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; WATCHSTEP_HOST, or this machine alone.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; WATCHSTEP_PORT, or 8642.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the port.")] = 1,
) -> None:
    """The API of a production service. SIGTERM lets requests that run finish."""
    settings = _checked()
    _migrated(settings)
    address = [host or settings.host, str(settings.port or 8642 if port is None else port)]
    _become(["-m", "watchstep_services.api.production", *address, str(processes)])


def worker(
    processes: Annotated[
        int | None, typer.Option(min=1, help="Evaluations and tries at a time; WATCHSTEP_WORKER_PROCESSES.")
    ] = None,
) -> None:
    """A worker of a production service: evaluates runs, tries actions. SIGTERM lets what runs finish."""
    settings = _checked()
    owner_rules(settings)
    _migrated(settings)
    count = str(processes or settings.worker_processes)
    # Workers learn of each other through the database alone: their gossip would only cost the broker.
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    _become([*_CELERY, "worker", "--concurrency", count, "--loglevel", settings.log_level, *quiet])


def scheduler(
    schedule: Annotated[
        Path, typer.Option(help="File that remembers when what was sent; it may be lost.")
    ] = Path("beat-schedule"),
) -> None:
    """The scheduler of a production service, of which there is one: tells workers when to look for work."""
    settings = _checked()
    _become([*_CELERY, "beat", "--schedule", str(schedule), "--pidfile=", "--loglevel", settings.log_level])


def _checked() -> Settings:
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)
    warn_of_unknown(os.environ)
    require_production(settings)
    return settings


def _migrated(settings: Settings) -> None:
    database = open_database(settings.resolved_database_url)
    try:
        prepare(database, settings)
    finally:
        database.close()


def _become(arguments: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter that runs now, whatever PATH says.
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **shared_folder()})  # noqa: S606
