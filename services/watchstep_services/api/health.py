"""Whether the service lives, and whether it can work."""

from __future__ import annotations

from fastapi import APIRouter

from watchstep.errors import WatchstepError
from watchstep_services.api.access import Served, open_to_all
from watchstep_services.api.models import Health
from watchstep_services.api.problems import RefusedError

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Is the process alive?")
@open_to_all
def healthz() -> Health:
    """Alive."""
    return Health(status="ok")


@router.get("/readyz", summary="Can it work?")
@open_to_all
def readyz(service: Served) -> Health:
    """Whether database and store answer."""
    try:
        service.database.check()
        service.stores.open(service.settings.store)
    except WatchstepError as error:
        raise RefusedError(503, error.what, error.mend) from error
    return Health(status="ok")
