"""Management of tokens: creation on behalf of a caller, listing, revocation, and tokens of single runs.

An operator may create recorder tokens of its own runs. They outlive the token that created them, so that a job of weeks continues after
a launcher's short-lived token has expired. They end with their own expiry, the end of their run, or the revocation of the token that
created them.
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
"""Limit in seconds."""


class TooMuchError(ConfigError):
    """The requested token would have more permissions than the caller's token."""


@dataclass(frozen=True)
class TokenRequest:
    """A requested token.

    Attributes:
        role: its role.
        project: its only project; None for all.
        name: its name for people.
        lifetime_seconds: lifetime; None for unlimited.
    """

    role: Role
    project: str | None = None
    name: str = ""
    lifetime_seconds: int | None = None


def create_for(database: Database, request: TokenRequest, maker: AuthenticatedCaller) -> str:
    """Create a token on behalf of a caller. It is returned only here.

    Its permissions, projects and lifetime must not exceed the caller's.

    Raises:
        TooMuchError: they do.
        BadNameError, ConfigError: as raised by `create_token`.
    """
    more = PERMISSIONS[request.role] - PERMISSIONS.get(maker.role, frozenset())
    if more:
        raise TooMuchError(
            f"role {request.role}: may {', '.join(sorted(more))}, which a {maker.role} token may not",
            "request a role without more permissions than your own token",
        )
    if maker.project is not None and request.project != maker.project:
        raise TooMuchError(
            f"project {request.project or 'all'}: not your own token's project, {maker.project!r}",
            "request a token of your own project",
        )
    lifetime = request.lifetime_seconds
    if maker.expires_ns is not None:
        with database.read() as session:
            left = (maker.expires_ns - read_clock(session)) / NANOSECONDS
        if lifetime is None or lifetime > left:
            raise TooMuchError(
                f"lifetime_seconds {'unlimited' if lifetime is None else lifetime}: your own token expires in {max(0, int(left))}",
                "request a token that expires no later than your own",
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
    """Conditions that select tokens of a project, or of one run of it; empty for all."""
    conditions: list[ColumnElement[bool]] = [] if project is None else [Token.project == project]
    return conditions if run is None else [*conditions, Token.run == run]


def that_work() -> list[ColumnElement[bool]]:
    """Conditions that select valid tokens."""
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
    """Find a token by its id.

    Args:
        database: the database.
        public: its id.
        project: project to search; None for all.
        run: run of the project to search; None for all runs and the project's own tokens.

    Raises:
        NotFoundError: it does not exist there.
    """
    with database.read() as session:
        row = session.execute(
            select(Token).where(Token.id == public, *of_project(project, run))
        ).scalar_one_or_none()
    if row is None:
        raise _unknown(public)
    return row


@dataclass(frozen=True)
class Revocation:
    """A revoked token, and the tokens that were revoked with it.

    Attributes:
        token: the token.
        run_tokens: ids of the valid tokens of single runs that it had created.
    """

    token: Token
    run_tokens: tuple[str, ...]


def revoke(
    database: Database,
    public: str,
    project: str | None,
    revoked_by: str,
    *,
    run: str | None = None,
    keep_created: bool = False,
) -> Revocation:
    """Revoke a token, and the tokens of single runs that it created. Safe to repeat; the first revocation is kept.

    Args:
        database: the database.
        public: its id.
        project: project to search; None for all.
        revoked_by: who revokes it, for records.
        run: as in `find_token`.
        keep_created: keep the tokens that it created, for a token that is replaced while jobs run.

    Raises:
        NotFoundError: it does not exist there.
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
        run_tokens = () if keep_created else _revoke_created(session, row, now)
        session.flush()
        session.refresh(row)  # reloads the properties of its run, which a change does not update
        return Revocation(row, run_tokens)


def _revoke_created(session: Session, maker: Token, now: int) -> tuple[str, ...]:
    # `create_for_run` locks the maker as well, so no token is created concurrently.
    revoked = session.execute(
        update(Token)
        .where(Token.maker == maker.id, Token.run_id.is_not(None), Token.revoked_ns.is_(None))
        .values(revoked_ns=now, revoked_by=f"with token {maker.id}, which created it")
        .returning(Token.id)
        .execution_options(synchronize_session=False)
    )
    return tuple(sorted(revoked.scalars()))


def forget_named(database: Database, name: str, created_by: str) -> None:
    """Delete tokens that an earlier process created for itself and did not delete, because it was killed."""
    with database.write() as session:
        session.execute(delete(Token).where(Token.name == name, Token.created_by == created_by))


def _unknown(public: str) -> NotFoundError:
    return NotFoundError(f"token {public[:64]!r}: not found", "list the tokens to see their ids")


LIFETIME_SECONDS = 90 * 86_400
"""Default lifetime: the wait in a queue, and a training of weeks."""

MOST_SECONDS = 366 * 86_400

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunTokenRequest:
    """A requested token of one run.

    Attributes:
        project: the run's project.
        run: name of a registered run.
        name: the token's name for people; "run NAME" if empty.
        lifetime_seconds: lifetime, at most `MOST_SECONDS`.
    """

    project: str
    run: str
    name: str = ""
    lifetime_seconds: int = LIFETIME_SECONDS


def create_for_run(database: Database, request: RunTokenRequest, maker: AuthenticatedCaller | str) -> str:
    """Create a recorder token of one run. It is returned only here.

    An operator creates tokens of runs that its own token registered. It takes over a run without an owner: one that no valid token has
    registered, and that does not run at the moment.

    Args:
        database: the database.
        request: the requested token.
        maker: the caller; for the database's owner, who needs no token, its name in records.

    Raises:
        BadNameError, NotFoundError: the run does not exist.
        ConflictError: its project is archived.
        TooMuchError: another token owns the run, or the caller may create none.
        ConfigError: the token's name or lifetime is not valid.
    """
    run_prefix(request.project, request.run)
    name = check_token_name(request.name or f"run {request.run}"[:MAX_NAME])
    if not 0 < request.lifetime_seconds <= MOST_SECONDS:
        raise ConfigError(
            f"lifetime_seconds {request.lifetime_seconds}: a token of one run has at most {MOST_SECONDS}",
            "request less, and create another token later",
        )
    who = maker if isinstance(maker, str) else maker.who
    with database.write() as session:
        if isinstance(maker, AuthenticatedCaller):  # locked before the run, as by revocations and deletions
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
    _log.info("token %s of run %s/%s created by %s", public, request.project, request.run, who)
    return token


def _locked(session: Session, project: str, run: str) -> RunRow:
    chosen = select(RunRow).filter_by(project=project, run=run).with_for_update(key_share=True)
    row = session.execute(chosen).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"run {project}/{run}: not found", "register it first, or check the name")
    return row


def _check_maker(session: Session, maker: AuthenticatedCaller, project: str) -> None:
    """Check that the caller's token is valid now, and lock it, because the tokens that it creates end with it."""
    row = session.execute(
        select(Token).where(Token.id == maker.token).with_for_update(read=True)
    ).scalar_one_or_none()
    good = row is not None and state_of(row, read_clock(session)) == "active"
    if not good or not maker.may("operate") or not maker.sees(project):
        raise TooMuchError(
            f"a {maker.role} token may create no tokens here"
            if good
            else "your own token is no longer valid",
            "use an operator's or an admin's token of the project",
        )


def _check_owner(session: Session, run: RunRow, maker: AuthenticatedCaller) -> None:
    if maker.may("administer") or run.registered_by == maker.token:
        return
    owner = session.get(Token, run.registered_by) if run.registered_by else None
    if owner is not None and state_of(owner, read_clock(session)) == "active":
        raise TooMuchError(
            f"run {run.project}/{run.run}: registered with token {owner.id}, not with yours",
            "register a run of your own, or have an admin create the token",
        )
    if run.attempt and run.ended_ns is None:
        raise TooMuchError(
            f"run {run.project}/{run.run}: is running, and no valid operator's token has registered it",
            "have an admin create the token, or wait for its end",
        )
    _log.info("run %s/%s taken over by %s", run.project, run.run, maker.who)
    run.registered_by = maker.token
