"""Tokens: an admin of all projects makes, lists and revokes any; an admin of one project those of the project."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import OnceSecret
from watchstep_services.api.routes.token_output import (
    Active,
    KeepMade,
    TokenList,
    TokenMade,
    TokenOutput,
    TokenRevoked,
    listed,
    made,
    revoked,
    shown,
)
from watchstep_services.api.schemas.paging import Paged
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.auth.roles import AuthenticatedCaller, Role
from watchstep_services.auth.token_register import (
    MAX_LIFETIME,
    TokenRequest,
    TooMuchError,
    create_for,
    find_token,
    of_project,
    revoke,
)
from watchstep_services.auth.tokens import MAX_NAME
from watchstep_services.service.context import Service

router = APIRouter(tags=["tokens"])
_ALL = "/v1/tokens"
_OF_PROJECT = "/v1/projects/{project}/tokens"
_EXAMPLE: dict[str, Any] = {"role": "recorder", "name": "cluster a", "lifetime_seconds": 7_776_000}


class ProjectTokenInput(BaseModel):
    """A token to make."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_EXAMPLE]})

    role: Role = Field(description="What it may do; no more than your own.")
    name: str = Field(
        min_length=1, max_length=MAX_NAME, description="What people call it: who or what uses it."
    )
    lifetime_seconds: int | None = Field(
        None, ge=1, le=MAX_LIFETIME, description="After so long it is worthless; never where left out."
    )


class TokenInput(ProjectTokenInput):
    """A token to make, of one project or of all."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{**_EXAMPLE, "project": "vision"}]}
    )

    project: str | None = Field(
        None, max_length=128, description="The only one that it is for; all where left out."
    )


@router.get(_ALL, summary="List all tokens")
@permits("administer")
def list_tokens(service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Of every project and of all."""
    return listed(service, of_project(None), paging, active)


@router.post(
    _ALL, summary="Make a token", status_code=201, dependencies=[OnceSecret], responses=documented(409)
)
@permits("administer")
def post_token(body: TokenInput, service: Served, caller: Caller, response: Response) -> TokenMade:
    """Of one project or of all. The answer shows it, once."""
    request = TokenRequest(body.role, body.project, body.name, body.lifetime_seconds)
    return _make(service, caller, request, response)


@router.get(f"{_ALL}/{{id}}", summary="Look at a token")
@permits("administer")
def get_token(id: str, service: Served) -> TokenOutput:  # noqa: A002 - the name in the path
    """Any token."""
    return shown(service, find_token(service.database, id, None))


@router.delete(f"{_ALL}/{{id}}", summary="Revoke a token")
@permits("administer")
def delete_token(
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
    keep_made: KeepMade = False,
) -> TokenRevoked:
    """Any token. It is worthless within five seconds, and stays in the list; so are the tokens of single runs that it made.

    Safe to repeat.
    """
    return revoked(request, revoke(service.database, id, None, caller.who, keep_made=keep_made))


@router.get(_OF_PROJECT, summary="List a project's tokens")
@permits("administer")
def list_project_tokens(project: str, service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Those that are for this project only, or for one of its runs."""
    return listed(service, of_project(project), paging, active)


@router.post(
    _OF_PROJECT,
    summary="Make a project's token",
    status_code=201,
    dependencies=[OnceSecret],
    responses=documented(409),
)
@permits("administer")
def post_project_token(
    project: str, body: ProjectTokenInput, service: Served, caller: Caller, response: Response
) -> TokenMade:
    """For this project only. The answer shows it, once."""
    return _make(
        service, caller, TokenRequest(body.role, project, body.name, body.lifetime_seconds), response
    )


@router.get(f"{_OF_PROJECT}/{{id}}", summary="Look at a project's token")
@permits("administer")
def get_project_token(project: str, id: str, service: Served) -> TokenOutput:  # noqa: A002 - the name in the path
    """One that is for this project only."""
    return shown(service, find_token(service.database, id, project))


@router.delete(f"{_OF_PROJECT}/{{id}}", summary="Revoke a project's token")
@permits("administer")
def delete_project_token(
    project: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
    keep_made: KeepMade = False,
) -> TokenRevoked:
    """One that is for this project only, as any token is revoked."""
    return revoked(request, revoke(service.database, id, project, caller.who, keep_made=keep_made))


def _make(
    service: Service, caller: AuthenticatedCaller, request: TokenRequest, response: Response
) -> TokenMade:
    try:
        token = create_for(service.database, request, caller)
    except TooMuchError as error:
        raise RequestRefusedError(403, error.what, error.hint) from error
    return made(service, token, response)
