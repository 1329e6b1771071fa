"""Assembly of the API application."""

from __future__ import annotations

from functools import cache

from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.routing import BaseRoute

from watchstep_services.api import openapi
from watchstep_services.api.middleware import policies
from watchstep_services.api.middleware.access import Gate, TokenCache, document_token
from watchstep_services.api.middleware.connections import Connections
from watchstep_services.api.middleware.observation import Observed
from watchstep_services.api.middleware.policies import Routes
from watchstep_services.api.middleware.rate_limits import rate_limits
from watchstep_services.api.middleware.request_limits import WorkSlots
from watchstep_services.api.middleware.transports import PacedAnswers, UnreadBytes
from watchstep_services.api.middleware.uniform_responses import UniformResponses
from watchstep_services.api.page import install_page
from watchstep_services.api.queries.state import Queries
from watchstep_services.api.routes import (
    actions,
    alert_changes,
    alert_page,
    alerts,
    announcements,
    backends,
    capture,
    comparison,
    control,
    credentials,
    events,
    health,
    pictures,
    projects,
    receivers,
    retention,
    routing,
    rule_pages,
    rules,
    run_pages,
    runs,
    samples,
    silences,
    snapshots,
    statistics,
    stops,
    stores,
    tensor_pages,
    tokens,
    traces,
)
from watchstep_services.api.schemas import problems
from watchstep_services.api.streaming import Streams
from watchstep_services.service.context import Service

ROUTERS = (
    announcements.router,  # by far the most frequent
    runs.router,
    run_pages.router,
    comparison.router,
    projects.router,
    stores.router,
    backends.router,
    credentials.router,
    control.router,
    retention.router,
    capture.router,
    alerts.router,
    alerts.notification_state_router,
    alert_changes.router,
    alert_page.router,
    pictures.router,
    silences.router,
    stops.router,
    actions.router,
    runs.attempts_router,
    rules.run_rules_router,
    rules.project_rules_router,
    rule_pages.router,
    receivers.router,
    routing.router,
    events.router,
    rules.router,
    rules.backtests_router,
    statistics.router,
    tensor_pages.router,
    snapshots.router,
    samples.router,
    traces.router,
    tokens.router,
    tokens.run_tokens_router,
    health.router,
    health.metrics_router,
)


def create_app(service: Service) -> FastAPI:
    """Create the API of a service. Every route is refused unless its policy permits the token (`access.Gate`)."""
    app = _without_routes()
    app.state.service = service
    app.state.queries = Queries.of(service)
    app.state.work_slots = WorkSlots.of_process()
    app.state.readiness_threads = CapacityLimiter(health.READINESS_THREADS)
    app.state.streams = Streams(service)
    app.state.connections = Connections(service.settings)
    problems.install(app)
    openapi.install_conventions(app)
    app.router.routes.extend(_routes())
    included = len(app.routes)
    openapi.install_document(app)
    install_page(
        app
    )  # after the routers, because routes are matched in order, and most requests are announcements
    routes = Routes((*(route for router in ROUTERS for route in router.routes), *app.routes[included:]))
    app.state.token_cache = TokenCache()
    limits = rate_limits(service.settings)
    app.add_middleware(Gate, service=service, routes=routes, limits=limits, token_cache=app.state.token_cache)
    app.add_middleware(PacedAnswers, unread=UnreadBytes(service.settings.unread_mb))
    app.add_middleware(UniformResponses)
    app.add_middleware(Observed)
    return app


def _without_routes() -> FastAPI:
    return FastAPI(
        title="Watchstep",
        description="Evaluates recorded training runs, manages alerts, stops jobs.",
        version="1",
        openapi_url=None,  # `document` installs the OpenAPI document and its pages
        redirect_slashes=False,
        responses=problems.PROBLEMS,
        generate_unique_id_function=openapi.operation_id,
        # Client generators give a pair `X-Input` and `X-Output` the same name, and drop the operations of one of them.
        separate_input_output_schemas=False,
    )


@cache
def _routes() -> tuple[BaseRoute, ...]:
    """Return the routes of all routers. Applications of a process share them: to build them takes a second."""
    app = _without_routes()
    for router in ROUTERS:
        policies.describe(router)
        app.include_router(router, dependencies=policies.documented(router, document_token))
    for route in app.router.routes:
        # FastAPI builds the routes of a router when it first matches a request, which a client would wait for.
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return tuple(app.router.routes)
