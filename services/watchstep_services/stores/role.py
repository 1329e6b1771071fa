"""Credentials of a registered role, by AssumeRole with the external id, and credentials lent to recorders.

Both are bounded by a session policy; a recorder's are for one attempt of one run, and for an hour.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from watchstep.errors import ConfigError, StoreError
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.policies import attempt_policy

SESSION_SECONDS = 3600
"""The longest that AWS gives to a role that takes another."""

_NAME = re.compile(r"[^A-Za-z0-9_=,.@-]")


class RoleCredentials:
    """What obstore asks for credentials, some minutes before those that it has expire. Thread-safe.

    Nothing else is ever tried where the role is refused: not the service's own credentials.
    """

    def __init__(self, registration: StoreRegistration, policy: str, session_name: str) -> None:
        """Nothing is asked yet.

        Args:
            registration: the store, with a role.
            policy: the session's.
            session_name: stands in AWS's log of who did what.
        """
        self._registration = registration
        self._policy = policy
        self._session_name = _NAME.sub("-", session_name)[:64]
        self._lock = threading.Lock()
        self._client: Any = None

    def __call__(self) -> dict[str, Any]:
        """Fresh credentials.

        Raises:
            StoreError: the role is refused, or AWS does not answer.
            ConfigError: boto3 is not installed.
        """
        with self._lock:
            self._client = self._client or _sts(self._registration)
        given = _assume(self._client, self._registration, self._policy, self._session_name)
        expires: datetime = given["Expiration"]
        return {
            "access_key_id": str(given["AccessKeyId"]),
            "secret_access_key": str(given["SecretAccessKey"]),
            "token": str(given["SessionToken"]),
            "expires_at": expires.astimezone(timezone.utc),  # obstore takes this zone only
        }


def _sts(registration: StoreRegistration) -> Any:
    try:
        import boto3  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ConfigError(
            f"store {registration.url}: has a role, and boto3 is not installed",
            "install watchstep[aws] where the service runs",
        ) from error
    from botocore.exceptions import BotoCoreError

    try:
        return _client(registration.region, os.environ.get("AWS_ENDPOINT_URL", ""))
    except BotoCoreError as error:
        raise _no_answer(registration, error) from error


@functools.lru_cache(maxsize=64)  # one takes half a second of a processor to make
def _client(region: str, _endpoint: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoCredentialsError

    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 3, "mode": "standard"})
    session = boto3.Session()
    if session.get_credentials() is None:  # a client would have none for as long as it lives
        raise NoCredentialsError
    return session.client("sts", region_name=region or session.region_name or "us-east-1", config=config)


def _assume(
    client: Any, registration: StoreRegistration, policy: str, session_name: str
) -> Mapping[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    asked: dict[str, Any] = {
        "RoleArn": registration.role_arn,
        "RoleSessionName": session_name,
        "Policy": policy,
        "DurationSeconds": SESSION_SECONDS,
    }
    if registration.external_id:
        asked["ExternalId"] = registration.external_id
    try:
        given: Mapping[str, Any] = client.assume_role(**asked)["Credentials"]
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "refused"))
        raise StoreError(
            f"store {registration.url}: role {registration.role_arn} cannot be taken ({code})",
            "let the role trust the service's own identity, with the external id that is registered",
        ) from error
    except BotoCoreError as error:
        raise _no_answer(registration, error) from error
    return given


def _no_answer(registration: StoreRegistration, error: Exception) -> StoreError:
    return StoreError(
        f"store {registration.url}: role {registration.role_arn} cannot be taken ({type(error).__name__})",
        "see that the service has AWS credentials of its own, and that it reaches STS",
    )


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
