"""Tokens that record one run and nothing else, which an operator may make for a run of its own.

They outlive the token that made them, so that a job of weeks goes on after a launcher's token of hours has ended; what bounds them is
their own time, the end of their run, and that who revokes their maker revokes them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import run_prefix
from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.auth.token_register import TooMuchError, state_of
from watchstep_services.auth.tokens import MAX_NAME, add_token, check_token_name
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RunRow, Token
from watchstep_services.tenancy.projects import open_project

LIFETIME_SECONDS = 90 * 86_400
"""Where none is asked for: the wait in a queue, and a training of weeks."""

MOST_SECONDS = 366 * 86_400

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunTokenRequest:
    """A token to make.

    Attributes:
        project: of the run.
        run: its name; it is known to the service.
        name: what people call the token; of the run where it is empty.
        lifetime_seconds: after so long it is worthless, and `MOST_SECONDS` at the most.
    """

    project: str
    run: str
    name: str = ""
    lifetime_seconds: int = LIFETIME_SECONDS


def create_for_run(database: Database, request: RunTokenRequest, maker: AuthenticatedCaller | str) -> str:
    """Make a recorder's token of one run; it is returned here and never again.

    An operator makes those of a run that its own token made known. It takes over a run that is nobody's: of which no token that is
    still good made it known, and that does not go on at the moment.

    Args:
        database: where it is kept.
        request: what to make.
        maker: whose token asks; or, of the database's owner, who needs none, what records say of it.

    Raises:
        BadNameError, NotFoundError: there is no such run.
        ConflictError: its project is archived.
        TooMuchError: the run is somebody else's, or the maker may make none.
        ConfigError: the token's name or its time cannot be used.
    """
    run_prefix(request.project, request.run)
    name = check_token_name(request.name or f"run {request.run}"[:MAX_NAME])
    if not 0 < request.lifetime_seconds <= MOST_SECONDS:
        raise ConfigError(
            f"lifetime_seconds {request.lifetime_seconds}: not within {MOST_SECONDS}, for a token of one run",
            "ask for less, and make another later",
        )
    who = maker if isinstance(maker, str) else maker.who
    with database.write() as session:
        if isinstance(maker, AuthenticatedCaller):  # before the run: who revokes or deletes goes the same way
            _check_maker(session, maker, request.project)
        open_project(session, request.project)
        run = _locked(session, request.project, request.run)
        if isinstance(maker, AuthenticatedCaller):
            _check_owner(session, run, maker)
        row = Token(
            role="recorder", project=request.project, run_id=run.id, name=name, created_by=who,
            maker="" if isinstance(maker, str) else maker.token,
        )  # fmt: skip
        token = add_token(session, row, request.lifetime_seconds)
        public = row.id
    _log.info("token %s of run %s/%s made by %s", public, request.project, request.run, who)
    return token


def _locked(session: Session, project: str, run: str) -> RunRow:
    chosen = select(RunRow).filter_by(project=project, run=run).with_for_update(key_share=True)
    row = session.execute(chosen).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"run {project}/{run}: not known", "register it first, or check the name")
    return row


def _check_maker(session: Session, maker: AuthenticatedCaller, project: str) -> None:
    """See that the maker's token is good now: a moment ago is not enough, for what it makes ends with it."""
    row = session.execute(
        select(Token).where(Token.id == maker.token).with_for_update(read=True)
    ).scalar_one_or_none()
    good = row is not None and state_of(row, read_clock(session)) == "active"
    if not good or not maker.may("operate") or not maker.sees(project):
        raise TooMuchError(
            f"a {maker.role} token may make none here" if good else "your own token has ended",
            "use an operator's or an admin's token of the project",
        )


def _check_owner(session: Session, run: RunRow, maker: AuthenticatedCaller) -> None:
    if maker.may("administer") or run.registered_by == maker.token:
        return
    owner = session.get(Token, run.registered_by) if run.registered_by else None
    if owner is not None and state_of(owner, read_clock(session)) == "active":
        raise TooMuchError(
            f"run {run.project}/{run.run}: was registered with token {owner.id}, not with yours",
            "register a run of your own, or have an admin make the token",
        )
    if run.attempt and run.ended_ns is None:
        raise TooMuchError(
            f"run {run.project}/{run.run}: goes on, and no operator's token that is still good has registered it",
            "have an admin make the token, or wait for its end",
        )
    _log.info("run %s/%s is taken over by %s", run.project, run.run, maker.who)
    run.registered_by = maker.token
