"""Tokens of all projects, of one project, and of one run.

An admin of all projects creates, lists and revokes any token; an admin of one project, tokens of that project. An operator creates,
lists and revokes recorder tokens of its own runs; an admin, those of any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement

from watchstep import __version__
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits, service_of
from watchstep_services.api.middleware.idempotency import OnceSecret
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput, Paging
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.auth import (
    LIFETIME_SECONDS,
    MAX_LIFETIME,
    MAX_NAME,
    MOST_SECONDS,
    PERMISSIONS,
    AuthenticatedCaller,
    Permission,
    Revocation,
    Role,
    RunTokenRequest,
    TokenRequest,
    TooMuchError,
    create_for,
    create_for_run,
    ends_ns,
    find_token,
    id_of,
    of_project,
    revoke,
    state_of,
    that_work,
)
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Token
from watchstep_services.service.context import Service


class TokenOutput(BaseModel):
    """A token, without its secret."""

    id: str = Field(description="Public id: the part of the token between the underscores.")
    name: str
    role: str
    project: str | None = Field(description="Project that the token is limited to; null: all projects.")
    run: str | None = Field(description="Run of the project that the token is limited to; null: all runs.")
    state: str = Field(description="active, expired or revoked.")
    created_ns: int
    created_by: str
    expires_ns: int | None = Field(
        description="Expiry; for a token of a run, at the latest 14 days after the run has ended."
    )
    revoked_ns: int | None
    revoked_by: str
    last_used_ns: int | None = Field(description="Last use, rounded to the minute.")


class TokenCreated(TokenOutput):
    """A new token, with its secret. No other response contains the secret."""

    token: str = Field(description="The token with its secret, which is not shown again.")


class TokenList(PageOutput):
    """Tokens, newest first."""

    tokens: list[TokenOutput]


class TokenRevoked(TokenOutput):
    """A revoked token."""

    run_tokens: list[str] = Field(
        description="Ids of run tokens that it created and that are revoked with it."
    )


Active = Annotated[bool, Query(description="Only valid tokens.")]


KeepCreated = Annotated[
    bool,
    Query(
        description="Keep the run tokens that it created, so that their jobs continue after the token is replaced."
    ),
]


router = APIRouter(tags=["tokens"])
_ALL = "/v1/tokens"
_OF_PROJECT = "/v1/projects/{project}/tokens"
_EXAMPLE: dict[str, Any] = {"role": "recorder", "name": "cluster a", "lifetime_seconds": 7_776_000}


class ProjectTokenInput(BaseModel):
    """A token to create."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    role: Role = Field(description="Role of the token, which must not exceed the caller's.")
    name: str = Field(
        min_length=1, max_length=MAX_NAME, description="Display name: who or what uses the token."
    )
    lifetime_seconds: int | None = Field(
        None, ge=1, le=MAX_LIFETIME, description="Lifetime; default: unlimited."
    )


class TokenInput(ProjectTokenInput):
    """A token to create, of one project or of all."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{**_EXAMPLE, "project": "vision"}]}
    )

    project: str | None = Field(
        None, max_length=128, description="Project that the token is limited to; default: all projects."
    )


class CallerOutput(BaseModel):
    """The token of a request: what it may do, and until when."""

    id: str = Field(description="Public id of the token.")
    name: str
    role: str
    permissions: list[Permission] = Field(description="Permissions of its role.")
    project: str | None = Field(description="Project that the token is limited to; null: all projects.")
    run: str | None = Field(description="Run of the project that the token is limited to; null: all runs.")
    expires_ns: int | None = Field(description="Expiry; null: never.")
    version: str = Field(description="Version of the service.")


@router.get("/v1/caller", summary="Describe the token of the request")
@permits("read", all_projects=False, run_in_body=True)
async def get_caller(caller: Caller) -> CallerOutput:
    """Return the role, permissions and limits of the token that the request has."""
    return CallerOutput(
        id=caller.token,
        name=caller.name,
        role=caller.role,
        permissions=sorted(PERMISSIONS.get(caller.role, ())),
        project=caller.project,
        run=caller.run,
        expires_ns=caller.expires_ns,
        version=__version__,
    )


@router.get(_ALL, summary="List all tokens")
@permits("administer")
def list_tokens(service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Return the tokens of all projects, of single projects and of single runs."""
    return token_page(service, of_project(None), paging, active)


@router.post(
    _ALL, summary="Create a token", status_code=201, dependencies=[OnceSecret], responses=documented(409)
)
@permits("administer")
def post_token(body: TokenInput, service: Served, caller: Caller, response: Response) -> TokenCreated:
    """Create a token of one project or of all. Only this response contains its secret."""
    request = TokenRequest(body.role, body.project, body.name, body.lifetime_seconds)
    return _create(service, caller, request, response)


@router.get(f"{_ALL}/{{id}}", summary="Get a token")
@permits("administer")
def get_token(id: str, service: Served) -> TokenOutput:  # noqa: A002 - the name in the path
    """Return any token."""
    return token_output(service, find_token(service.database, id, None))


@router.delete(f"{_ALL}/{{id}}", summary="Revoke a token")
@permits("administer")
def delete_token(
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
    keep_created: KeepCreated = False,
) -> TokenRevoked:
    """Revoke any token, and the run tokens that it created. They become invalid within five seconds, and remain in the list.

    Idempotent.
    """
    return revoked_output(request, revoke(service.database, id, None, caller.who, keep_created=keep_created))


@router.get(_OF_PROJECT, summary="List a project's tokens")
@permits("administer")
def list_project_tokens(project: str, service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Return the tokens that are limited to this project, or to one of its runs."""
    return token_page(service, of_project(project), paging, active)


@router.post(
    _OF_PROJECT,
    summary="Create a project's token",
    status_code=201,
    dependencies=[OnceSecret],
    responses=documented(409),
)
@permits("administer")
def post_project_token(
    project: str, body: ProjectTokenInput, service: Served, caller: Caller, response: Response
) -> TokenCreated:
    """Create a token that is limited to this project. Only this response contains its secret."""
    return _create(
        service, caller, TokenRequest(body.role, project, body.name, body.lifetime_seconds), response
    )


@router.get(f"{_OF_PROJECT}/{{id}}", summary="Get a project's token")
@permits("administer")
def get_project_token(project: str, id: str, service: Served) -> TokenOutput:  # noqa: A002 - the name in the path
    """Return a token that is limited to this project."""
    return token_output(service, find_token(service.database, id, project))


@router.delete(f"{_OF_PROJECT}/{{id}}", summary="Revoke a project's token")
@permits("administer")
def delete_project_token(
    project: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
    keep_created: KeepCreated = False,
) -> TokenRevoked:
    """Revoke a token that is limited to this project, and the run tokens that it created. Idempotent."""
    return revoked_output(
        request, revoke(service.database, id, project, caller.who, keep_created=keep_created)
    )


def _create(
    service: Service, caller: AuthenticatedCaller, request: TokenRequest, response: Response
) -> TokenCreated:
    try:
        token = create_for(service.database, request, caller)
    except TooMuchError as error:
        raise RequestRefusedError(403, error.what, error.hint) from error
    return created_output(service, token, response)


def token_page(
    service: Service, conditions: Sequence[ColumnElement[bool]], paging: Paging, active: bool
) -> TokenList:
    """Return a page of tokens.

    Args:
        service: the service.
        conditions: conditions that select the tokens.
        paging: the page.
        active: whether to return valid tokens only.
    """
    order = (ListOrder(Token.created_ns, descending=True), ListOrder(Token.id))
    with service.database.read() as session:
        now = read_clock(session)
        rows, following = paging.fetch(
            session, Token, [*conditions, *(that_work() if active else ())], *order
        )
    return TokenList(tokens=[_output(row, now) for row in rows], next_page_token=following)


def created_output(service: Service, token: str, response: Response) -> TokenCreated:
    """Return a new token, in a response that proxies must not cache."""
    response.headers["cache-control"] = "no-store"
    output = token_output(service, find_token(service.database, id_of(token), None))
    return TokenCreated(**output.model_dump(), token=token)


def token_output(service: Service, row: Token) -> TokenOutput:
    """Return the current state of a token."""
    with service.database.read() as session:
        return _output(row, read_clock(session))


def revoked_output(request: Request, revoked: Revocation) -> TokenRevoked:
    """Return a revoked token, and drop it and the tokens that it created from this process's cache."""
    for public in (revoked.token.id, *revoked.run_tokens):
        request.app.state.token_cache.discard(public)
    output = token_output(service_of(request), revoked.token)
    return TokenRevoked(**output.model_dump(), run_tokens=list(revoked.run_tokens))


def _output(row: Token, now: int) -> TokenOutput:
    computed: dict[str, Any] = {"state": state_of(row, now), "expires_ns": ends_ns(row)}
    columns = {name: getattr(row, name) for name in TokenOutput.model_fields if name not in computed}
    return TokenOutput(**computed, **columns)


run_tokens_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/tokens", tags=["tokens"])
_RUN_TOKEN_EXAMPLE: dict[str, Any] = {"name": "job of run resnet50-17", "lifetime_seconds": 7_776_000}


class RunTokenInput(BaseModel):
    """A recorder token of one run to create."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [_RUN_TOKEN_EXAMPLE]}
    )

    name: str = Field("", max_length=MAX_NAME, description="Display name; default: the name of the run.")
    lifetime_seconds: int = Field(
        LIFETIME_SECONDS,
        ge=1,
        le=MOST_SECONDS,
        description="Lifetime; default: 90 days. It may exceed that of the caller's token.",
    )


@run_tokens_router.get("", summary="List a run's tokens")
@permits("operate")
def list_run_tokens(
    project: str, run: str, service: Served, paging: Paged, active: Active = False
) -> TokenList:
    """Return the tokens that are limited to this run."""
    with service.database.read() as session:
        find_run(session, project, run)
    return token_page(service, of_project(project, run), paging, active)


@run_tokens_router.post(
    "",
    summary="Create a run's token",
    status_code=201,
    dependencies=[OnceSecret],
    responses=documented(409),
)
@permits("operate")
def post_run_token(
    project: str, run: str, body: RunTokenInput, service: Served, caller: Caller, response: Response
) -> TokenCreated:
    """Create a recorder token for this run and all its attempts. Only this response contains its secret.

    The token expires after its lifetime, 14 days after the end of the run, when the run is deleted, and when the caller's token is
    revoked. An operator may create it only for a run that its own token registered, or for a run without an owner that is not running.
    """
    request = RunTokenRequest(project, run, body.name, body.lifetime_seconds)
    try:
        token = create_for_run(service.database, request, caller)
    except TooMuchError as error:
        raise RequestRefusedError(403, error.what, error.hint) from error
    return created_output(service, token, response)


@run_tokens_router.get("/{id}", summary="Get a run's token")
@permits("operate")
def get_run_token(
    project: str,
    run: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
) -> TokenOutput:
    """Return a token that is limited to this run."""
    with service.database.read() as session:
        find_run(session, project, run)
    return token_output(service, find_token(service.database, id, project, run))


@run_tokens_router.delete("/{id}", summary="Revoke a run's token")
@permits("operate")
def delete_run_token(
    project: str,
    run: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
) -> TokenRevoked:
    """Revoke a token that is limited to this run. It becomes invalid within five seconds, and remains in the list. Idempotent."""
    with service.database.read() as session:
        find_run(session, project, run)
    return revoked_output(request, revoke(service.database, id, project, caller.who, run=run))
