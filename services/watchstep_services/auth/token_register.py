"""The tokens that there are: made in somebody's name, listed, revoked.

Tokens that record one run and nothing else, which an operator may make for a run of its own.

They outlive the token that made them, so that a job of weeks goes on after a launcher's token of hours has ended; what bounds them is
their own time, the end of their run, and that who revokes their maker revokes them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import run_prefix
from watchstep_services.auth.tokens import (
    MAX_NAME,
    OVER_SECONDS,
    PERMISSIONS,
    AuthenticatedCaller,
    Role,
    add_token,
    check_token_name,
    create_token,
    ends_ns,
)
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RunRow, Token
from watchstep_services.tenancy.projects import open_project

MAX_LIFETIME = 10 * 366 * 86_400
"""Seconds."""


class TooMuchError(ConfigError):
    """A token that could do more than the one that asks for it."""


@dataclass(frozen=True)
class TokenRequest:
    """A token to make.

    Attributes:
        role: what it may do.
        project: the only one that it is for; all where None.
        name: what people call it.
        lifetime_seconds: after so long it is worthless; never where None.
    """

    role: Role
    project: str | None = None
    name: str = ""
    lifetime_seconds: int | None = None


def create_for(database: Database, request: TokenRequest, maker: AuthenticatedCaller) -> str:
    """Make a token in somebody's name; it is returned here and never again.

    It may do no more than its maker may, in no other project, and no longer.

    Raises:
        TooMuchError: it would.
        BadNameError, ConfigError: as `create_token`.
    """
    more = PERMISSIONS[request.role] - PERMISSIONS.get(maker.role, frozenset())
    if more:
        raise TooMuchError(
            f"role {request.role}: may {', '.join(sorted(more))}, and a {maker.role} token may not",
            "ask for a role that may no more than your own token",
        )
    if maker.project is not None and request.project != maker.project:
        raise TooMuchError(
            f"project {request.project or 'all'}: is not that of your own token, {maker.project!r}",
            "ask for a token of your own project",
        )
    lifetime = request.lifetime_seconds
    if maker.expires_ns is not None:
        with database.read() as session:
            left = (maker.expires_ns - read_clock(session)) / NANOSECONDS
        if lifetime is None or lifetime > left:
            raise TooMuchError(
                f"lifetime_seconds {'never ending' if lifetime is None else lifetime}: your own token ends in {max(0, int(left))}",
                "ask for a token that ends no later than your own",
            )
    return create_token(
        database,
        request.role,
        request.project,
        name=request.name,
        created_by=maker.who,
        lifetime_seconds=lifetime,
    )


def of_project(project: str | None, run: str | None = None) -> list[ColumnElement[bool]]:
    """The conditions that a token is for one project only, and for one run of it; none, so that all are meant, where that is None."""
    conditions: list[ColumnElement[bool]] = [] if project is None else [Token.project == project]
    return conditions if run is None else [*conditions, Token.run == run]


def that_work() -> list[ColumnElement[bool]]:
    """The conditions that tokens can be used now."""
    return [
        Token.revoked_ns.is_(None),
        or_(Token.expires_ns.is_(None), Token.expires_ns > now_ns()),
        or_(Token.run_over_ns.is_(None), Token.run_over_ns > now_ns() - nanoseconds(OVER_SECONDS)),
    ]


def state_of(row: Token, now: int) -> str:
    """``active``, ``expired`` or ``revoked`` at a time in nanoseconds."""
    if row.revoked_ns is not None:
        return "revoked"
    ends = ends_ns(row)
    return "expired" if ends is not None and ends <= now else "active"


def find_token(database: Database, public: str, project: str | None, run: str | None = None) -> Token:
    """A token by its id.

    Args:
        database: where it is kept.
        public: its id.
        project: the only one to look in; all where None.
        run: the only one of the project to look in; all, and the project's own tokens, where None.

    Raises:
        NotFoundError: there is none there.
    """
    with database.read() as session:
        row = session.execute(
            select(Token).where(Token.id == public, *of_project(project, run))
        ).scalar_one_or_none()
    if row is None:
        raise _unknown(public)
    return row


@dataclass(frozen=True)
class Revoked:
    """A token that is worthless, and those that ended with it.

    Attributes:
        token: as it stands.
        made: ids of tokens of single runs that it made, and that worked until now.
    """

    token: Token
    made: tuple[str, ...]


def revoke(
    database: Database,
    public: str,
    project: str | None,
    revoked_by: str,
    *,
    run: str | None = None,
    keep_made: bool = False,
) -> Revoked:
    """Make a token worthless from its next request on, and the tokens of single runs that it made. Safe to repeat; the first time counts.

    Args:
        database: where it is kept.
        public: its id.
        project: the only one to look in; all where None.
        revoked_by: who does, as records show it.
        run: as of `find_token`.
        keep_made: leave what it made, as where it is replaced by another while jobs go on.

    Raises:
        NotFoundError: there is none there.
    """
    with database.write() as session:
        row = session.execute(
            select(Token).where(Token.id == public, *of_project(project, run)).with_for_update()
        ).scalar_one_or_none()
        if row is None:
            raise _unknown(public)
        now = read_clock(session)
        if row.revoked_ns is None:
            row.revoked_ns, row.revoked_by = now, revoked_by[:256]
        made = () if keep_made else _revoke_made(session, row, now)
        session.flush()
        session.refresh(row)  # what it says of its run is left behind by a change
        return Revoked(row, made)


def _revoke_made(session: Session, maker: Token, now: int) -> tuple[str, ...]:
    # `run_tokens` locks the maker as well: none is made that this does not see.
    ended = session.execute(
        update(Token)
        .where(Token.maker == maker.id, Token.run_id.is_not(None), Token.revoked_ns.is_(None))
        .values(revoked_ns=now, revoked_by=f"with token {maker.id}, which made it")
        .returning(Token.id)
        .execution_options(synchronize_session=False)
    )
    return tuple(sorted(ended.scalars()))


def forget_named(database: Database, name: str, created_by: str) -> None:
    """Take away what an earlier process made for itself and could not take away, because it was killed."""
    with database.write() as session:
        session.execute(delete(Token).where(Token.name == name, Token.created_by == created_by))


def _unknown(public: str) -> NotFoundError:
    return NotFoundError(f"token {public[:64]!r}: not known", "list the tokens for their ids")


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
