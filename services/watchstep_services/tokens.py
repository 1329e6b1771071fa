"""Bearer tokens: made once, shown once, kept only as a hash."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete

from watchstep.layout import check_name
from watchstep_services.database.clock import read_clock
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Token

Role = Literal["viewer", "recorder", "operator", "admin"]
Permission = Literal["read", "record", "operate", "administer"]

PERMISSIONS: dict[str, frozenset[Permission]] = {
    "viewer": frozenset({"read"}),
    "recorder": frozenset({"record"}),
    "operator": frozenset({"read", "record", "operate"}),
    "admin": frozenset({"read", "record", "operate", "administer"}),
}


@dataclass(frozen=True)
class Identity:
    """Who asks: a role, in one project or, where that is None, in all."""

    role: str
    project: str | None

    def may(self, permission: Permission) -> bool:
        """Whether the role has a permission."""
        return permission in PERMISSIONS.get(self.role, frozenset())


def create_token(database: Database, role: Role, project: str | None = None) -> str:
    """Make a token; it is returned here and never again.

    Raises:
        BadNameError: the project's name cannot be used.
    """
    if project is not None:
        check_name("project", project)
    token = f"ws_{secrets.token_urlsafe(32)}"
    with database.write() as session:
        session.add(Token(sha256=_hash(token), role=role, project=project, created_ns=read_clock(session)))
    return token


def revoke_token(database: Database, token: str) -> None:
    """Make a token worthless; one that is not known is no error."""
    with database.write() as session:
        session.execute(delete(Token).where(Token.sha256 == _hash(token)))


def identify(database: Database, token: str) -> Identity | None:
    """Whose token this is; None for nobody's."""
    with database.read() as session:
        row = session.get(Token, _hash(token))
        return None if row is None else Identity(row.role, row.project)


def _hash(token: str) -> str:
    # 256 random bits need no slow hash: they cannot be guessed.
    return hashlib.sha256(token.encode()).hexdigest()
