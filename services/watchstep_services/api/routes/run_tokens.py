"""Tokens that record one run: an operator makes them for a run of its own, lists and revokes them; an admin of any run."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import OnceSecret
from watchstep_services.api.routes.token_output import (
    Active,
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
from watchstep_services.auth.run_tokens import LIFETIME_SECONDS, MOST_SECONDS, RunTokenRequest, create_for_run
from watchstep_services.auth.token_register import TooMuchError, find_token, of_project, revoke
from watchstep_services.auth.tokens import MAX_NAME

run_tokens_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/tokens", tags=["tokens"])
_RUN_TOKEN_EXAMPLE: dict[str, Any] = {"name": "job of run resnet50-17", "lifetime_seconds": 7_776_000}


class RunTokenInput(BaseModel):
    """A recorder's token of one run to make."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra={"examples": [_RUN_TOKEN_EXAMPLE]})

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
