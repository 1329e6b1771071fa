"""Errors as ``application/problem+json`` (RFC 9457), and the registry of their types.

A program distinguishes problems by ``type``; the texts are for people, and include a hint.
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
from watchstep_services.tenancy.projects import ConflictError

PREFIX = "urn:watchstep:problem:"


@dataclass(frozen=True)
class ProblemType:
    """A kind of problem.

    Attributes:
        status: of the answer.
        meaning: when it is given.
    """

    status: int
    meaning: str


TYPES: dict[str, ProblemType] = {
    "no-token": ProblemType(401, "No token, or one that is not known."),
    "not-allowed": ProblemType(403, "The token's role or project does not allow this."),
    "not-found": ProblemType(404, "There is no such thing, or none that the token may see."),
    "wrong-method": ProblemType(
        405, "The address does not take this method; `Allow` names those that it takes."
    ),
    "conflict": ProblemType(
        409, "It contradicts what is there, as an Idempotency-Key of another request does."
    ),
    "changed": ProblemType(412, "The thing is not the one that `If-Match` names."),
    "too-large": ProblemType(
        413, "The request is too large, or its answer would be: `hint` says how to ask for less."
    ),
    "too-long": ProblemType(414, "The address is too long."),
    "large-headers": ProblemType(431, "The headers are too many or too large."),
    "wrong-range": ProblemType(416, "The `Range` lies outside of the content."),
    "invalid": ProblemType(422, "A value cannot be used."),
    "too-many": ProblemType(
        429, "Too many requests, or too many queries at once; `Retry-After` says when to try again."
    ),
    "fault": ProblemType(500, "The service failed; its log says why."),
    "damaged": ProblemType(502, "What lies on the store is damaged, or no longer there."),
    "unavailable": ProblemType(503, "The database or the store does not answer."),
}

_BY_STATUS = {held.status: name for name, held in TYPES.items()}


def type_of(status: int) -> str:
    """The type of a problem with a status, as a URI."""
    return PREFIX + _BY_STATUS.get(status, "fault" if status >= 500 else "invalid")


def described(*statuses: int) -> dict[int, str]:
    """What some statuses mean."""
    return {status: TYPES[_BY_STATUS[status]].meaning for status in statuses}


MEDIA_TYPE = "application/problem+json"
_log = logging.getLogger(__name__)


class Problem(BaseModel):
    """What went wrong."""

    type: str = Field(description="The kind of problem, for programs: urn:watchstep:problem:…")
    title: str = Field(description="The kind of problem, for people.")
    status: int
    detail: str = Field(description="What is wrong: the thing and its value.")
    hint: str = Field(description="What to do about it.")


class RequestRefusedError(WatchstepError):
    """A request that is not granted.

    Args:
        status: of the answer.
        what: the thing and its value.
        hint: what to do about it.
        headers: of the answer.
    """

    def __init__(self, status: int, what: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what, hint)
        self.status = status
        self.headers = headers


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers of an endpoint that its part of the OpenAPI document names: ``responses=documented(409)``."""
    return {
        code: {"model": Problem, "description": text, "content": {MEDIA_TYPE: {}}}
        for code, text in described(*statuses).items()
    }


PROBLEMS = documented(401, 403, 404, 409, 413, 414, 422, 429, 503)
"""Those that every endpoint may give."""

_STATUS: tuple[tuple[type[WatchstepError], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (BusyError, 503),
    (ConfigError, 422),
    (RuleError, 422),
    (OverBudgetError, 413),
    (FormatError, 502),
    (StoreError, 503),
)


_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}


def install(app: FastAPI) -> None:
    """Answer every error as a problem; none shows a stack trace."""
    app.add_exception_handler(WatchstepError, _watchstep)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SQLAlchemyError, _database)
    app.add_exception_handler(Exception, _unexpected)


def problem(
    status: int, title: str, what: str, hint: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An answer that tells a problem."""
    held = Problem(type=type_of(status), title=title, status=status, detail=redact(what), hint=redact(hint))
    content = held.model_dump()
    return JSONResponse(content, status, headers=headers or _HEADERS.get(status), media_type=MEDIA_TYPE)


def answer_to(request: Request, error: Exception) -> JSONResponse:
    """The answer to an error that was raised before the application."""
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
    place = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return problem(422, "Invalid", f"{place}: {message}", "see /docs for what this address takes")


def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if (
        error.status_code == 400
    ):  # a body that is no JSON at all; the framework tells it apart, the document does not
        return problem(
            422,
            "Invalid",
            f"body: {error.detail}",
            "send JSON in UTF-8; see /docs for what this address takes",
        )
    return problem(error.status_code, "Refused", str(error.detail), "see /docs for the addresses and methods")


def _database(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, DataError):
        return problem(
            422, "Invalid", "a value that the database cannot hold", "leave out characters like NUL"
        )
    _log.error("database: %s", error)
    return problem(503, "Unavailable", "the database does not answer", "try again; see /readyz")


def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(
        500, "Fault", "the service failed on this request", "see the service's log; please report it"
    )
