"""The figures for Prometheus, for those with a token. On a port of their own they need none (`exposition.serve`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import State

from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.core.telemetry.exposition import registry, written
from watchstep_services.db.figures import DatabaseFigures
from watchstep_services.service.context import Service

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
