"""Tokens: an admin of all projects makes, lists and revokes any; an admin of one project those of the project.

Tokens as the API shows them: of all projects, of one, of one run.

Tokens that record one run: an operator makes them for a run of its own, lists and revokes them; an admin of any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement

from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits, service_of
from watchstep_services.api.middleware.idempotency import OnceSecret
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput, Paging
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.auth.token_register import (
    LIFETIME_SECONDS,
    MAX_LIFETIME,
    MOST_SECONDS,
    Revoked,
    RunTokenRequest,
    TokenRequest,
    TooMuchError,
    create_for,
    create_for_run,
    find_token,
    of_project,
    revoke,
    state_of,
    that_work,
)
from watchstep_services.auth.tokens import MAX_NAME, AuthenticatedCaller, Role, ends_ns, id_of
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Token
from watchstep_services.service.context import Service


class TokenOutput(BaseModel):
    """A token, without its secret."""

    id: str = Field(description="Public; its part of the token between the underscores.")
    name: str
    role: str
    project: str | None = Field(description="The only one that it is for; null for all.")
    run: str | None = Field(description="The only run of the project that it is for; null for all.")
    state: str = Field(description="active, expired or revoked.")
    created_ns: int
    created_by: str
    expires_ns: int | None = Field(
        description="Of a token of a run, at the latest 14 days after that has ended."
    )
    revoked_ns: int | None
    revoked_by: str
    last_used_ns: int | None = Field(description="To the minute.")


class TokenMade(TokenOutput):
    """A new token: the only answer that shows it."""

    token: str = Field(description="Keep it: it is nowhere shown again.")


class TokenList(PageOutput):
    """Tokens, the newest first."""

    tokens: list[TokenOutput]


class TokenRevoked(TokenOutput):
    """A token that is worthless."""

    made: list[str] = Field(
        description="Ids of tokens of single runs that it had made, and that ended with it."
    )


Active = Annotated[bool, Query(description="Only those that can be used now.")]


KeepMade = Annotated[
    bool,
    Query(
        description="Leave the tokens of single runs that it made: jobs of somebody who goes on with another token."
    ),
]


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


def listed(
    service: Service, conditions: Sequence[ColumnElement[bool]], paging: Paging, active: bool
) -> TokenList:
    """A page of tokens.

    Args:
        service: whose they are.
        conditions: which.
        paging: which page.
        active: only those that can be used now.
    """
    newest = (ListOrder(Token.created_ns, descending=True), ListOrder(Token.id))
    with service.database.read() as session:
        now = read_clock(session)
        rows, following = paging.fetch(
            session, Token, [*conditions, *(that_work() if active else ())], *newest
        )
    return TokenList(tokens=[_output(row, now) for row in rows], next_page_token=following)


def made(service: Service, token: str, response: Response) -> TokenMade:
    """A new token, in an answer that nobody between keeps."""
    response.headers["cache-control"] = "no-store"
    seen = shown(service, find_token(service.database, id_of(token), None))
    return TokenMade(**seen.model_dump(), token=token)


def shown(service: Service, row: Token) -> TokenOutput:
    """A token as it stands now."""
    with service.database.read() as session:
        return _output(row, read_clock(session))


def revoked(request: Request, done: Revoked) -> TokenRevoked:
    """A token that was revoked, which this process knows no more, nor those that ended with it."""
    for public in (done.token.id, *done.made):
        request.app.state.known_tokens.forget(public)
    seen = shown(service_of(request), done.token)
    return TokenRevoked(**seen.model_dump(), made=list(done.made))


def _output(row: Token, now: int) -> TokenOutput:
    told: dict[str, Any] = {"state": state_of(row, now), "expires_ns": ends_ns(row)}
    held = {name: getattr(row, name) for name in TokenOutput.model_fields if name not in told}
    return TokenOutput(**told, **held)


run_tokens_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/tokens", tags=["tokens"])
_RUN_TOKEN_EXAMPLE: dict[str, Any] = {"name": "job of run resnet50-17", "lifetime_seconds": 7_776_000}


class RunTokenInput(BaseModel):
    """A recorder's token of one run to make."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [_RUN_TOKEN_EXAMPLE]}
    )

    name: str = Field("", max_length=MAX_NAME, description="What people call it; of the run where left out.")
    lifetime_seconds: int = Field(
        LIFETIME_SECONDS,
        ge=1,
        le=MOST_SECONDS,
        description="After so long it is worthless; 90 days where left out. It may be longer than your own token's.",
    )


@run_tokens_router.get("", summary="List a run's tokens")
@permits("operate")
def list_run_tokens(
    project: str, run: str, service: Served, paging: Paged, active: Active = False
) -> TokenList:
    """Those that are for this run only."""
    with service.database.read() as session:
        find_run(session, project, run)
    return listed(service, of_project(project, run), paging, active)


@run_tokens_router.post(
    "",
    summary="Make a run's token",
    status_code=201,
    dependencies=[OnceSecret],
    responses=documented(409),
)
@permits("operate")
def post_run_token(
    project: str, run: str, body: RunTokenInput, service: Served, caller: Caller, response: Response
) -> TokenMade:
    """A recorder's, for this run and all its attempts. The answer shows it, once.

    It ends with its time, 14 days after the run, when the run is deleted, and when your own token is revoked. An operator makes it
    of a run that its own token has registered, or that is nobody's and does not go on.
    """
    request = RunTokenRequest(project, run, body.name, body.lifetime_seconds)
    try:
        token = create_for_run(service.database, request, caller)
    except TooMuchError as error:
        raise RequestRefusedError(403, error.what, error.hint) from error
    return made(service, token, response)


@run_tokens_router.get("/{id}", summary="Look at a run's token")
@permits("operate")
def get_run_token(
    project: str,
    run: str,
    id: str,  # noqa: A002 - the name in the path
    service: Served,
) -> TokenOutput:
    """One that is for this run only."""
    with service.database.read() as session:
        find_run(session, project, run)
    return shown(service, find_token(service.database, id, project, run))


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
    """One that is for this run only. It is worthless within five seconds, and stays in the list. Safe to repeat."""
    with service.database.read() as session:
        find_run(session, project, run)
    return revoked(request, revoke(service.database, id, project, caller.who, run=run))
