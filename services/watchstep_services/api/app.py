"""The application, put together."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from watchstep_services.api import alerts, announcements, backtests, events, health, problems, rules, runs
from watchstep_services.api.access import authorize
from watchstep_services.service import Service


def create_app(service: Service) -> FastAPI:
    """The API of a service; every route needs a token unless `access.OPEN_PATHS` names it."""
    app = FastAPI(
        title="Watchstep",
        description="Evaluates recorded training runs, keeps alerts, stops jobs.",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        swagger_ui_oauth2_redirect_url=None,
        dependencies=[Depends(authorize)],
        responses=problems.PROBLEMS,
    )
    app.state.service = service
    problems.install(app)
    for part in (runs, announcements, alerts, events, rules, backtests, health):
        app.include_router(part.router)
    return app
