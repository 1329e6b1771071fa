"""Whether the service lives, and whether it can work."""

from __future__ import annotations

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request

from watchstep.errors import WatchstepError
from watchstep_services.api.middleware.access import Served, open_to_all
from watchstep_services.api.schemas.models import ServiceHealth
from watchstep_services.api.schemas.problems import RequestRefusedError
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
