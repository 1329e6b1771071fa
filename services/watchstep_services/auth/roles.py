"""What roles may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
