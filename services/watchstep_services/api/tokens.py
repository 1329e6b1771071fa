"""Tokens: an admin of all projects makes, lists and revokes any; an admin of one project those of the project."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import or_

from watchstep_services.api.access import Caller, Served, permits
from watchstep_services.api.idempotency import OnceSecret
from watchstep_services.api.paging import Order, Paged, PageOutput, Paging
from watchstep_services.api.problems import RefusedError, documented
from watchstep_services.database.clock import now_ns, read_clock
from watchstep_services.database.models import Token
from watchstep_services.roles import Identity, Role
from watchstep_services.service import Service
from watchstep_services.token_register import (
    MAX_LIFETIME,
    TokenRequest,
    TooMuchError,
    create_for,
    find_token,
    of_project,
    revoke,
    state_of,
)
from watchstep_services.tokens import MAX_NAME, id_of

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


class TokenOutput(BaseModel):
    """A token, without its secret."""

    id: str = Field(description="Public; its part of the token between the underscores.")
    name: str
    role: str
    project: str | None = Field(description="The only one that it is for; null for all.")
    state: str = Field(description="active, expired or revoked.")
    created_ns: int
    created_by: str
    expires_ns: int | None
    revoked_ns: int | None
    revoked_by: str
    last_used_ns: int | None = Field(description="To the minute.")


class TokenMade(TokenOutput):
    """A new token: the only answer that shows it."""

    token: str = Field(description="Keep it: it is nowhere shown again.")


class TokenList(PageOutput):
    """Tokens, the newest first."""

    tokens: list[TokenOutput]


Active = Annotated[bool, Query(description="Only those that can be used now.")]


@router.get(_ALL, summary="List all tokens")
@permits("administer")
def list_tokens(service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Of every project and of all."""
    return _list(service, None, paging, active)


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
    return _shown(service, find_token(service.database, id, None))


@router.delete(f"{_ALL}/{{id}}", summary="Revoke a token")
@permits("administer")
def delete_token(
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
) -> TokenOutput:
    """Any token. It is worthless within five seconds, and stays in the list. Safe to repeat."""
    return _revoke(request, service, id, None, caller)


@router.get(_OF_PROJECT, summary="List a project's tokens")
@permits("administer")
def list_project_tokens(project: str, service: Served, paging: Paged, active: Active = False) -> TokenList:
    """Those that are for this project only."""
    return _list(service, project, paging, active)


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
    return _shown(service, find_token(service.database, id, project))


@router.delete(f"{_OF_PROJECT}/{{id}}", summary="Revoke a project's token")
@permits("administer")
def delete_project_token(
    project: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
    caller: Caller,
    request: Request,
) -> TokenOutput:
    """One that is for this project only. It is worthless within five seconds, and stays in the list. Safe to repeat."""
    return _revoke(request, service, id, project, caller)


def _revoke(
    request: Request, service: Service, public: str, project: str | None, caller: Identity
) -> TokenOutput:
    revoked = revoke(service.database, public, project, caller.who)
    request.app.state.known_tokens.forget(public)
    return _shown(service, revoked)


def _make(service: Service, caller: Identity, request: TokenRequest, response: Response) -> TokenMade:
    try:
        token = create_for(service.database, request, caller)
    except TooMuchError as error:
        raise RefusedError(403, error.what, error.mend) from error
    response.headers["cache-control"] = "no-store"
    shown = _shown(service, find_token(service.database, id_of(token), request.project))
    return TokenMade(**shown.model_dump(), token=token)


def _list(service: Service, project: str | None, paging: Paging, active: bool) -> TokenList:
    conditions = of_project(project)
    if active:
        conditions += [
            Token.revoked_ns.is_(None),
            or_(Token.expires_ns.is_(None), Token.expires_ns > now_ns()),
        ]
    newest = (Order(Token.created_ns, descending=True), Order(Token.id))
    with service.database.read() as session:
        now = read_clock(session)
        rows, following = paging.fetch(session, Token, conditions, *newest)
    return TokenList(tokens=[_output(row, now) for row in rows], next_page_token=following)


def _shown(service: Service, row: Token) -> TokenOutput:
    with service.database.read() as session:
        return _output(row, read_clock(session))


def _output(row: Token, now: int) -> TokenOutput:
    held: dict[str, Any] = {name: getattr(row, name) for name in TokenOutput.model_fields if name != "state"}
    return TokenOutput(state=state_of(row, now), **held)
