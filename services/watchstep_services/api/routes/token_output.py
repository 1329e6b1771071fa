"""Tokens as the API shows them: of all projects, of one, of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement

from watchstep_services.api.middleware.access import service_of
from watchstep_services.api.schemas.paging import ListOrder, PageOutput, Paging
from watchstep_services.auth.token_register import Revoked, find_token, state_of, that_work
from watchstep_services.auth.tokens import ends_ns, id_of
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
