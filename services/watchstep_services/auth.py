"""Bearer tokens, and the permissions of their roles. A token is shown once, and only its hash is stored.

A token is ``wst_<id>_<secret>``. The id is public: it identifies the row, and names the token in lists and logs. The id of tokens of the
earlier form ``ws_<secret>`` is the start of their hash.

Management of tokens: creation on behalf of a caller, listing, revocation, and tokens of single runs.

An operator may create recorder tokens of its own runs. They outlive the token that created them, so that a job of weeks continues after
a launcher's short-lived token has expired. They end with their own expiry, the end of their run, or the revocation of the token that
created them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, bindparam, delete, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import check_name, run_prefix
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RunRow, Token
from watchstep_services.tenancy import open_project

Role = Literal["viewer", "recorder", "operator", "admin"]


Permission = Literal["read", "record", "operate", "administer"]


ROLES: tuple[Role, ...] = get_args(Role)


PERMISSIONS: dict[str, frozenset[Permission]] = {
    "viewer": frozenset({"read"}),
    "recorder": frozenset({"record"}),
    "operator": frozenset({"read", "record", "operate"}),
    "admin": frozenset({"read", "record", "operate", "administer"}),
}


@dataclass(frozen=True)
class AuthenticatedCaller:
    """The authenticated caller of a request.

    Attributes:
        role: role of its token.
        project: its only project; None for all projects.
        token: the public id of its token.
        name: name of its token.
        expires_ns: when its token expires; None for never.
        run: its only run of the project; None for all runs.
    """

    role: str
    project: str | None
    token: str = ""
    name: str = ""
    expires_ns: int | None = None
    run: str | None = None

    @property
    def who(self) -> str:
        """The caller in records, without the secret."""
        role = self.role if self.run is None else f"{self.role} of run {self.project}/{self.run}"
        return f"{self.name} ({role}, token {self.token})" if self.name else f"{role}, token {self.token}"

    def may(self, permission: Permission) -> bool:
        """Whether the role has a permission."""
        return permission in PERMISSIONS.get(self.role, frozenset())

    def sees(self, project: str) -> bool:
        """Whether it may access a project."""
        return self.project in {None, project}


__all__ = [
    "PERMISSIONS",
    "AuthenticatedCaller",
    "Permission",
    "Role",
    "create_token",
    "digest_of",
    "id_of",
    "identify",
]

MAX_NAME = 128
OVER_SECONDS = 14 * 86_400
"""Time after the end of a run for which its tokens are valid, so that a restart in that time can use them."""

_ID_LENGTH = 16
_WITH_ID = re.compile(r"wst_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_MAX_LENGTH = 128
_USED_EVERY = nanoseconds(60.0)
_NO_DIGEST = "0" * 64
_log = logging.getLogger(__name__)


def create_token(
    database: Database,
    role: Role,
    project: str | None = None,
    *,
    name: str = "",
    created_by: str = "",
    lifetime_seconds: float | None = None,
) -> str:
    """Create a token. It is returned only here.

    Args:
        database: the database.
        role: its role.
        project: its only project; None for all.
        name: its name for people.
        created_by: who creates it, for records.
        lifetime_seconds: lifetime; None for unlimited.

    Raises:
        BadNameError: the project's name is not valid.
        ConfigError: the token's name is not valid.
    """
    if project is not None:
        check_name("project", project)
    check_token_name(name)
    row = Token(role=role, project=project, name=name, created_by=created_by)
    with database.write() as session:
        return add_token(session, row, lifetime_seconds)


def add_token(session: Session, row: Token, lifetime_seconds: float | None) -> str:
    """Complete a token's row and add it to the transaction. The token is returned only here.

    Args:
        session: a transaction.
        row: a new row with the token's permissions and creator.
        lifetime_seconds: as in `create_token`.
    """
    row.id = secrets.token_hex(_ID_LENGTH // 2)
    token = f"wst_{row.id}_{secrets.token_urlsafe(32)}"
    row.sha256 = digest_of(token)
    row.created_ns = read_clock(session)
    row.created_by = row.created_by[:256]
    row.expires_ns = None if lifetime_seconds is None else row.created_ns + nanoseconds(lifetime_seconds)
    session.add(row)
    return token


def check_token_name(name: str) -> str:
    """Check a token's name, which must be one line of text; return it.

    Raises:
        ConfigError: it is not valid.
    """
    if len(name) > MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"token name {name[:80]!r}: not a line of text", f"use up to {MAX_NAME} printable characters"
        )
    return name


def id_of(token: str) -> str:
    """The public id of a token, whether or not it exists."""
    match = _WITH_ID.fullmatch(token)
    return match[1] if match else digest_of(token)[:_ID_LENGTH]


def identify(database: Database, token: str) -> AuthenticatedCaller | None:
    """The caller of a token; None if it does not exist, has expired, was revoked, or its run is over.

    The time that it takes does not depend on the secret: the id finds the row, and the hashes are compared in constant time.
    """
    if len(token) > _MAX_LENGTH:
        return None
    with database.read() as session:
        row = session.execute(_IDENTITY, {"public": id_of(token)}).one_or_none()
    if not hmac.compare_digest(_NO_DIGEST if row is None else row.sha256, digest_of(token)) or row is None:
        return None
    ends = ends_ns(row)
    if row.revoked_ns is not None or (ends is not None and ends <= row.now_ns):
        return None
    if row.run_id is not None and None in (
        row.run,
        row.project,
    ):  # refused, rather than valid for the whole project
        return None
    if row.last_used_ns is None or row.last_used_ns <= row.now_ns - _USED_EVERY:
        _note_use(database, row.id)
    return AuthenticatedCaller(row.role, row.project, row.id, row.name, ends, row.run)


# Built once, and without the mapping: each recorder's token is looked up every few seconds.
_IDENTITY = select(
    Token.id,
    Token.sha256,
    Token.role,
    Token.project,
    Token.name,
    Token.run_id,
    Token.expires_ns,
    Token.revoked_ns,
    Token.last_used_ns,
    Token.run.label("run"),
    Token.run_over_ns.label("run_over_ns"),
    now_ns().label("now_ns"),
).where(Token.id == bindparam("public"))


def ends_ns(row: Any) -> int | None:
    """When a token ends without a revocation: at its expiry, or `OVER_SECONDS` after its run's end; None for never."""
    over = None if row.run_over_ns is None else row.run_over_ns + nanoseconds(OVER_SECONDS)
    return min((at for at in (row.expires_ns, over) if at is not None), default=None)


def _note_use(database: Database, public: str) -> None:
    try:
        with database.write() as session:
            session.execute(
                update(Token)
                .where(
                    Token.id == public,
                    or_(Token.last_used_ns.is_(None), Token.last_used_ns <= now_ns() - _USED_EVERY),
                )
                .values(last_used_ns=now_ns())
                .execution_options(synchronize_session=False)
            )
    except SQLAlchemyError as error:  # only informative, so no request fails for it
        _log.warning("token %s: its use was not recorded: %s", public, type(error).__name__)


def digest_of(token: str) -> str:
    """The stored hash of a token."""
    # 256 random bits need no slow hash, because they cannot be guessed.
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


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


def forget_named(database: Database, name: str, created_by: str, *, only_expired: bool = False) -> None:
    """Delete tokens that an earlier process created for itself and did not delete, or only those of them that have expired."""
    chosen = delete(Token).where(Token.name == name, Token.created_by == created_by)
    with database.write() as session:
        if only_expired:
            chosen = chosen.where(Token.expires_ns < read_clock(session))
        session.execute(chosen)


def _unknown(public: str) -> NotFoundError:
    return NotFoundError(f"token {public[:64]!r}: not found", "list the tokens to see their ids")


LIFETIME_SECONDS = 90 * 86_400
"""Default lifetime: the wait in a queue, and a training of weeks."""

MOST_SECONDS = 366 * 86_400


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
