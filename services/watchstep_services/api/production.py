"""Production server of the API, for ``watchstep api``."""

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
from watchstep_services.core.telemetry.metrics import registry, serve
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.metrics import DatabaseFigures
from watchstep_services.db.schema import prepare
from watchstep_services.scheduler.celery_client import app as celery
from watchstep_services.scheduler.production import production_service
from watchstep_services.service.context import owner_receivers, owner_rules


def create() -> FastAPI:
    """Create the API in a server process. uvicorn calls this factory.

    Raises:
        ConfigError: a setting is missing or not valid, or the database is not ready.
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
    with _close_streams_at_signals(app):
        yield
    tracing.stop()


@contextmanager
def _close_streams_at_signals(app: FastAPI) -> Iterator[None]:
    """Close the event streams at SIGTERM and SIGINT. Otherwise the server waits ``WATCHSTEP_DRAIN_SECONDS`` for them.

    The server notifies the application of its end only after that wait, so its signal handlers are wrapped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(number: int, frame: FrameType | None) -> None:
        app.state.streams.close()
        handler = handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(host: str, port: int, processes: int) -> None:
    """Serve until SIGTERM, then wait up to ``WATCHSTEP_DRAIN_SECONDS`` for requests in progress.

    Raises:
        ConfigError: as `create`, and if the port for metrics is not available.
    """
    settings = load_settings()
    logs.configure(settings.log, settings.log_level)
    owner_rules(settings)
    owner_receivers(settings)
    database = open_encrypted_database(settings)
    with ExitStack() as stack:
        stack.callback(forget_folder)
        stack.callback(database.close)
        prepare(database, settings)  # here too, because uvicorn restarts a worker process that fails to start
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
