"""Bearer tokens, and the permissions of their roles. A token is shown once, and only its hash is stored.

A token is ``wst_<id>_<secret>``. The id is public: it identifies the row, and names the token in lists and logs. The id of tokens of the
earlier form ``ws_<secret>`` is the start of their hash.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Token

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
        result = session.execute(select(Token, now_ns()).where(Token.id == id_of(token))).first()
    row, now = (None, 0) if result is None else result
    if not hmac.compare_digest(_NO_DIGEST if row is None else row.sha256, digest_of(token)) or row is None:
        return None
    ends = ends_ns(row)
    if row.revoked_ns is not None or (ends is not None and ends <= now):
        return None
    if row.run_id is not None and None in (
        row.run,
        row.project,
    ):  # refused, rather than valid for the whole project
        return None
    if row.last_used_ns is None or row.last_used_ns <= now - _USED_EVERY:
        _note_use(database, row.id)
    return AuthenticatedCaller(row.role, row.project, row.id, row.name, ends, row.run)


def ends_ns(row: Token) -> int | None:
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
