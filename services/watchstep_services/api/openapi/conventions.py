"""What all addresses have in common: ETags, keys for requests that create, a complete document."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute

from watchstep_services.api.middleware.etags import ETags
from watchstep_services.api.middleware.idempotency import AnsweredError, Answers, answer_again
from watchstep_services.api.openapi.operations import describe


def install_conventions(app: FastAPI) -> None:
    """Put them around an application."""
    describe(app)
    app.add_exception_handler(AnsweredError, answer_again)
    app.add_middleware(Answers)
    app.add_middleware(ETags)


def operation_id(route: APIRoute) -> str:
    """An operation is called as its function is; a client made from the document gets names that can be read."""
    return route.name
