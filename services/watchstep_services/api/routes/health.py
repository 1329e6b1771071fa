"""Whether the service lives, and whether it can work.

The figures for Prometheus, for those with a token. On a port of their own they need none (`exposition.serve`).
"""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import State

from watchstep.errors import WatchstepError
from watchstep_services.api.middleware.access import Caller, Served, open_to_all, permits
from watchstep_services.api.schemas.models import ServiceHealth
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.core.telemetry.exposition import registry, written
from watchstep_services.db.metrics import DatabaseFigures
from watchstep_services.service.context import Service

router = APIRouter(tags=["health"])

READINESS_THREADS = 2
"""Threads that ask database and store. They are not of the pool that requests share, which may be occupied."""


@router.get("/healthz", summary="Is the process alive?")
@open_to_all(counted=False)
async def healthz() -> ServiceHealth:
    """Alive."""
    return ServiceHealth(status="ok")


@router.get("/readyz", summary="Can it work?")
@open_to_all(counted=False)
async def readyz(request: Request, service: Served) -> ServiceHealth:
    """Whether database and store answer."""
    threads = request.app.state.readiness_threads
    assert isinstance(threads, CapacityLimiter)
    try:
        await to_thread.run_sync(_check, service, limiter=threads)
    except WatchstepError as error:
        raise RequestRefusedError(503, error.what, error.hint) from error
    return ServiceHealth(status="ok")


def _check(service: Service) -> None:
    service.database.check()
    service.stores.open(service.settings.store)


metrics_router = APIRouter(tags=["health"])


@metrics_router.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
@permits("read", all_projects=True)
def metrics(
    request: Request,
    caller: Caller,
    service: Served,
    accept: Annotated[str, Header(description="OpenMetrics where it is asked for.")] = "",
) -> Response:
    """What this process counted, and what stands in the database; of all projects together."""
    if caller.project is not None:
        raise RequestRefusedError(
            403, f"the token is of project {caller.project!r}", "use a viewer's token of all projects"
        )
    text, kind = written(registry(_of(request.app.state, service)), accept)
    return Response(text, media_type=kind)


def _of(state: State, service: Service) -> DatabaseFigures:
    held = getattr(state, "database_figures", None)
    if not isinstance(held, DatabaseFigures):
        held = state.database_figures = DatabaseFigures(service.database)
    return held
