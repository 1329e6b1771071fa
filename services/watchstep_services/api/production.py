"""The API in production: what ``watchstep api`` runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.connections import server_options
from watchstep_services.core.process import forget_folder, settle_collector
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import logs, tracing
from watchstep_services.core.telemetry.exposition import registry, serve
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.metrics import DatabaseFigures
from watchstep_services.db.schema import prepare
from watchstep_services.scheduler.celery_client import app as celery
from watchstep_services.scheduler.production import production_service
from watchstep_services.service.context import owner_receivers, owner_rules


def create() -> FastAPI:
    """The API of the production service, in each process: uvicorn's factory.

    Raises:
        ConfigError: a setting is missing or cannot be used, or the database is not ready.
    """
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)
    tracing.start("api")
    service = production_service(settings, celery)
    prepare(service.database, settings)
    app = create_app(service)
    app.router.lifespan_context = _lifespan
    settle_collector()
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    with _streams_end_at_signals(app):
        yield
    tracing.stop()


@contextmanager
def _streams_end_at_signals(app: FastAPI) -> Iterator[None]:
    """Event streams never end by themselves: the server would wait for them until ``WATCHSTEP_DRAIN_SECONDS`` are over.

    It tells an application that it ends only after that, so its handlers of signals are called through ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(number: int, frame: FrameType | None) -> None:
        app.state.streams.close()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(host: str, port: int, processes: int) -> None:
    """Serve until SIGTERM; then requests that run have ``WATCHSTEP_DRAIN_SECONDS`` to finish.

    Raises:
        ConfigError: as `create`, and where the port for figures cannot be listened on.
    """
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)
    owner_rules(settings)
    owner_receivers(settings)
    database = open_encrypted_database(settings)
    with ExitStack() as stack:
        stack.callback(forget_folder)
        stack.callback(database.close)
        prepare(database, settings)  # here too: a process that cannot start would be started again and again
        stack.callback(serve(settings, registry(DatabaseFigures(database))))
        uvicorn.run(
            "watchstep_services.api.production:create",
            factory=True,
            host=host,
            port=port,
            workers=processes,
            **server_options(),
            access_log=settings.access_log,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
