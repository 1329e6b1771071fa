"""The tokens that there are: made in somebody's name, listed, revoked."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_services.auth.roles import PERMISSIONS, AuthenticatedCaller, Role
from watchstep_services.auth.tokens import OVER_SECONDS, create_token, ends_ns
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Token

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
