"""Bearer tokens: made once, shown once, kept only as a hash.

A token is ``wst_<id>_<secret>``. The id is public: it finds the row, and names the token in lists and logs. Tokens of the
form ``ws_<secret>``, which were made before there were ids, have the start of their hash as id.

What roles may do.
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
    """Who asks.

    Attributes:
        role: what it may do.
        project: where; in all projects where that is None.
        token: the public id of its token.
        name: of its token.
        expires_ns: when its token ends; None where it does not.
        run: the only run of the project that it may do it to; all where that is None.
    """

    role: str
    project: str | None
    token: str = ""
    name: str = ""
    expires_ns: int | None = None
    run: str | None = None

    @property
    def who(self) -> str:
        """What a record of its deeds says of it: nothing of the secret."""
        role = self.role if self.run is None else f"{self.role} of run {self.project}/{self.run}"
        return f"{self.name} ({role}, token {self.token})" if self.name else f"{role}, token {self.token}"

    def may(self, permission: Permission) -> bool:
        """Whether the role has a permission."""
        return permission in PERMISSIONS.get(self.role, frozenset())

    def sees(self, project: str) -> bool:
        """Whether a project is one of its own."""
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
"""So long after a run has ended its tokens are good: what starts again under it meanwhile finds them so."""

_ID_LENGTH = 16
_WITH_ID = re.compile(r"wst_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_MAX_LENGTH = 128
_USED_EVERY = nanoseconds(60.0)
_NOBODYS = "0" * 64
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
    """Make a token; it is returned here and never again.

    Args:
        database: where it is kept.
        role: what it may do.
        project: the only one that it is for; all where None.
        name: what people call it.
        created_by: who makes it, as records show it.
        lifetime_seconds: after so long it is worthless; never where None.

    Raises:
        BadNameError: the project's name cannot be used.
        ConfigError: so can the token's.
    """
    if project is not None:
        check_name("project", project)
    check_token_name(name)
    row = Token(role=role, project=project, name=name, created_by=created_by)
    with database.write() as session:
        return add_token(session, row, lifetime_seconds)


def add_token(session: Session, row: Token, lifetime_seconds: float | None) -> str:
    """Give a row what makes it a token, and keep it with the transaction; the token is returned here and never again.

    Args:
        session: a transaction.
        row: new, and says what the token is for and who makes it.
        lifetime_seconds: as of `create_token`.
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
    """A token's name, which is one line of text.

    Raises:
        ConfigError: it is not.
    """
    if len(name) > MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"token name {name[:80]!r}: not a line of text", f"use up to {MAX_NAME} printable characters"
        )
    return name


def id_of(token: str) -> str:
    """The public id of a token, whether or not there is such a one."""
    found = _WITH_ID.fullmatch(token)
    return found[1] if found else digest_of(token)[:_ID_LENGTH]


def identify(database: Database, token: str) -> AuthenticatedCaller | None:
    """Whose token this is; None for nobody's, and for one that has expired, was revoked, or is a run's that is over.

    How long it takes says nothing of a secret: the id finds the row, and the hashes are compared in constant time.
    """
    if len(token) > _MAX_LENGTH:
        return None
    with database.read() as session:
        found = session.execute(select(Token, now_ns()).where(Token.id == id_of(token))).first()
    row, now = (None, 0) if found is None else found
    if not hmac.compare_digest(_NOBODYS if row is None else row.sha256, digest_of(token)) or row is None:
        return None
    ends = ends_ns(row)
    if row.revoked_ns is not None or (ends is not None and ends <= now):
        return None
    if row.run_id is not None and None in (row.run, row.project):  # it is nobody's rather than the project's
        return None
    if row.last_used_ns is None or row.last_used_ns <= now - _USED_EVERY:
        _note_use(database, row.id)
    return AuthenticatedCaller(row.role, row.project, row.id, row.name, ends, row.run)


def ends_ns(row: Token) -> int | None:
    """When a token ends that nobody revokes: at its own time, or `OVER_SECONDS` after its run has; None for never."""
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
    except SQLAlchemyError as error:  # a record for people; no request fails for it
        _log.warning("token %s: its use was not noted: %s", public, type(error).__name__)


def digest_of(token: str) -> str:
    """What is kept of a token."""
    # 256 random bits need no slow hash: they cannot be guessed.
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
