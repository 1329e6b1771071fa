"""Credentials for a recorder: of the store's role, for one attempt of one run, and for an hour."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from watchstep.errors import ConfigError
from watchstep_services.stores.place import StorePlace
from watchstep_services.stores.policies import attempt_policy
from watchstep_services.stores.role import RoleCredentials


@dataclass(frozen=True)
class ScopedCredentials:
    """What a recorder reaches its attempt with.

    Attributes:
        access_key_id: of AWS.
        secret_access_key: of AWS; in no log and no representation.
        session_token: of AWS; as the secret.
        expires_at: with a zone.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


def scoped_credentials(place: StorePlace, run: str, attempt: str) -> ScopedCredentials:
    """Take the store's role for what one attempt writes.

    Raises:
        BadNameError: a name cannot be used.
        ConfigError: the store has no role, or the names are too long for a session policy.
        StoreError: the role is refused.
    """
    if not place.registration.role_arn:
        raise ConfigError(
            f"project {place.project!r}: its store has no role that credentials could be taken of",
            "register the store with a role, or give the recorder credentials of its own",
        )
    policy = attempt_policy(place, run, attempt)
    given = RoleCredentials(place.registration, policy, f"watchstep-{place.project}-{run}")()
    return ScopedCredentials(
        given["access_key_id"], given["secret_access_key"], given["token"], given["expires_at"]
    )
