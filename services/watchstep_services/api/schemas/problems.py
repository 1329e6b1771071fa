"""Errors as ``application/problem+json`` (RFC 9457), and the registry of their types.

Programs distinguish problems by ``type``. The texts are for people, and include a hint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DataError, SQLAlchemyError
from starlette.exceptions import HTTPException

from watchstep.errors import ConfigError, FormatError, NotFoundError, RuleError, StoreError, WatchstepError
from watchstep.reading.budget import OverBudgetError
from watchstep_rules.custom.sandbox.pool import BusyError
from watchstep_services.core.redaction import redact
from watchstep_services.tenancy import ConflictError, StoreNotAllowedError

PREFIX = "urn:watchstep:problem:"


@dataclass(frozen=True)
class ProblemType:
    """A type of problem.

    Attributes:
        status: HTTP status of the response.
        meaning: when the service responds with it.
    """

    status: int
    meaning: str


TYPES: dict[str, ProblemType] = {
    "malformed": ProblemType(400, "A header that may occur once occurs several times."),
    "no-token": ProblemType(401, "The token is missing or not valid."),
    "not-allowed": ProblemType(403, "The token's role or project does not allow this."),
    "not-found": ProblemType(404, "The object does not exist, or the token may not see it."),
    "wrong-method": ProblemType(
        405, "The address does not support the method; `Allow` lists those that it supports."
    ),
    "conflict": ProblemType(
        409,
        "The request conflicts with the current state, for example an Idempotency-Key of another request.",
    ),
    "changed": ProblemType(412, "The object does not match `If-Match`."),
    "too-large": ProblemType(
        413, "The request or its response is too large; `hint` explains how to request less."
    ),
    "too-long": ProblemType(414, "The address is too long."),
    "large-headers": ProblemType(431, "The headers are too many or too large."),
    "wrong-range": ProblemType(416, "The `Range` is outside the content."),
    "invalid": ProblemType(422, "A value is not valid."),
    "too-many": ProblemType(
        429, "Too many requests, or too many concurrent queries; `Retry-After` contains the time to wait."
    ),
    "fault": ProblemType(500, "The service failed; its log contains the reason."),
    "damaged": ProblemType(502, "An object on the store is damaged or missing."),
    "unavailable": ProblemType(503, "The database or the store does not respond."),
}

_BY_STATUS = {kind.status: name for name, kind in TYPES.items()}


def type_of(status: int) -> str:
    """Return the type URI of problems with a status."""
    return PREFIX + _BY_STATUS.get(status, "fault" if status >= 500 else "invalid")


def described(*statuses: int) -> dict[int, str]:
    """Return the meanings of statuses."""
    return {status: TYPES[_BY_STATUS[status]].meaning for status in statuses}


MEDIA_TYPE = "application/problem+json"
_log = logging.getLogger(__name__)


class Problem(BaseModel):
    """An error response."""

    type: str = Field(
        description="Type of the problem, for programs: urn:watchstep:problem:…",
        examples=[f"{PREFIX}not-found"],
    )
    title: str = Field(description="Type of the problem, for people.")
    status: int
    detail: str = Field(description="The problem: object and value.")
    hint: str = Field(description="How to solve the problem.")


class RequestRefusedError(WatchstepError):
    """A request that the service refuses.

    Args:
        status: HTTP status of the response.
        what: object and value.
        hint: how to solve the problem.
        headers: headers of the response.
    """

    def __init__(self, status: int, what: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what, hint)
        self.status = status
        self.headers = headers


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return error responses of an endpoint for the OpenAPI document: ``responses=documented(409)``."""
    return {
        code: {"model": Problem, "description": text, "content": {MEDIA_TYPE: {}}}
        for code, text in described(*statuses).items()
    }


PROBLEMS = documented(401, 403, 404, 409, 413, 414, 422, 429, 503)
"""Error responses of every endpoint."""

_STATUS: tuple[tuple[type[WatchstepError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (StoreNotAllowedError, 403),
    (BusyError, 503),
    (ConfigError, 422),
    (RuleError, 422),
    (OverBudgetError, 413),
    (FormatError, 502),
    (StoreError, 503),
)


_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}


def install(app: FastAPI) -> None:
    """Install handlers that respond to every error with a problem. No response contains a stack trace."""
    app.add_exception_handler(WatchstepError, _watchstep)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SQLAlchemyError, _database)
    app.add_exception_handler(Exception, _unexpected)


def problem(
    status: int, title: str, what: str, hint: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error response."""
    detail, help_text = (redact(text).encode("utf-8", "backslashreplace").decode() for text in (what, hint))
    body = Problem(type=type_of(status), title=title, status=status, detail=detail, hint=help_text)
    content = body.model_dump()
    return JSONResponse(content, status, headers=headers or _HEADERS.get(status), media_type=MEDIA_TYPE)


def answer_to(request: Request, error: Exception) -> JSONResponse:
    """Return the response to an error that was raised outside the application."""
    if isinstance(error, WatchstepError):
        return _watchstep(request, error)
    if isinstance(error, SQLAlchemyError):
        return _database(request, error)
    if isinstance(error, HTTPException):
        return _http(request, error)
    return _unexpected(request, error)


def _watchstep(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WatchstepError)
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    headers: Mapping[str, str] | None = {"retry-after": "1"} if isinstance(error, BusyError) else None
    if isinstance(error, RequestRefusedError):
        status, headers = error.status, error.headers
    return problem(status, type(error).__name__.removesuffix("Error"), error.what, error.hint, headers)


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    _drop_tracebacks(error.__cause__, *(entry.get("ctx", {}).get("error") for entry in error.errors()))
    location = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return problem(422, "Invalid", f"{location}: {message}", "see /docs for the parameters of this address")


def _drop_tracebacks(*causes: object) -> None:
    """Drop the tracebacks of the errors of parsers and validators that caused a refusal.

    Their frames lead to frames of the framework, whose variables contain the refusal. This cycle would keep the body of the request until
    a collection (`core.process`).
    """
    for cause in causes:
        if isinstance(cause, BaseException):
            cause.__traceback__ = None


def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    _drop_tracebacks(error.__cause__)
    if (
        error.status_code == 400
    ):  # not JSON at all: the framework uses a status of its own, the OpenAPI document does not
        return problem(
            422,
            "Invalid",
            f"body: {error.detail}",
            "send JSON in UTF-8; see /docs for the body of this address",
        )
    return problem(error.status_code, "Refused", str(error.detail), "see /docs for the addresses and methods")


def _database(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, DataError):
        return problem(
            422, "Invalid", "a value cannot be stored in the database", "remove characters such as NUL"
        )
    _log.error("database: %s", error)
    return problem(503, "Unavailable", "the database does not respond", "try again; see /readyz")


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(
        500,
        "Fault",
        "the service failed to process the request",
        "see the service's log, and report the problem",
    )
