"""Liveness, readiness, and metrics for Prometheus.

`/metrics` requires a token here. On their own port, the metrics need none (`metrics.serve`).
"""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import State

from watchstep import __version__
from watchstep.errors import WatchstepError
from watchstep_services.api.middleware.access import Caller, Served, open_to_all, permits
from watchstep_services.api.schemas.models import QueueStatus, ServiceHealth, ServiceStatus
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.core.telemetry.metrics import registry, written
from watchstep_services.db.metrics import DatabaseFigures, waiting_seconds
from watchstep_services.service.context import Service

router = APIRouter(tags=["health"])

READINESS_THREADS = 2
"""Threads that check the database and the store. They are separate from the pool of the requests, which may be busy."""


@router.get("/healthz", summary="Check that the process is alive")
@open_to_all(counted=False)
async def healthz() -> ServiceHealth:
    """Return ok as long as the process responds."""
    return ServiceHealth(status="ok")


@router.get("/readyz", summary="Check that the service is ready")
@open_to_all(counted=False)
async def readyz(request: Request, service: Served) -> ServiceHealth:
    """Return ok if the database and the store respond, else 503."""
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


@metrics_router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
@permits("read", all_projects=True)
def metrics(
    request: Request,
    caller: Caller,
    service: Served,
    accept: Annotated[str, Header(description="Media type; OpenMetrics if requested.")] = "",
) -> Response:
    """Return the metrics of this process and of the database, over all projects."""
    if caller.project is not None:
        raise RequestRefusedError(
            403, f"the token is limited to project {caller.project!r}", "use a viewer token of all projects"
        )
    text, kind = written(registry(_database_figures(request.app.state, service)), accept)
    return Response(text, media_type=kind)


@metrics_router.get("/v1/service", summary="Describe the service's queues")
@permits("read", all_projects=True)
def get_service(request: Request, service: Served) -> ServiceStatus:
    """Return what waits in the service, over all projects, and for how long. At most two seconds old."""
    status = _status_of(_database_figures(request.app.state, service))
    return (
        status.model_copy(update={"projects": waiting_seconds(service.database)})
        if status.database
        else status
    )


def _status_of(figures: DatabaseFigures) -> ServiceStatus:
    values: dict[str, dict[str, float]] = {
        family.name: {",".join(sample.labels.values()): sample.value for sample in family.samples}
        for family in figures.collect()
    }
    ages = values.get("watchstep_queue_age_seconds", {})
    return ServiceStatus(
        version=__version__,
        database=values["watchstep_database_up"][""] == 1,
        queues=[
            QueueStatus(name=name, length=int(length), oldest_seconds=ages.get(name, 0.0))
            for name, length in values.get("watchstep_queue_length", {}).items()
        ],
        waiting_segments=int(values.get("watchstep_segments_waiting", {}).get("", 0)),
        oldest_segment_seconds=values.get("watchstep_segments_waiting_age_seconds", {}).get("", 0.0),
        pending_actions=_counts(values.get("watchstep_actions_pending", {})),
        runs=_counts(values.get("watchstep_runs", {})),
    )


def _counts(values: dict[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}


def _database_figures(state: State, service: Service) -> DatabaseFigures:
    figures = getattr(state, "database_figures", None)
    if not isinstance(figures, DatabaseFigures):
        figures = state.database_figures = DatabaseFigures(service.database)
    return figures
