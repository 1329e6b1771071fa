"""The project's role on AWS, and session policies that narrow it to one project or one attempt.

AWS lets a session do what both the role's policies and the session's policy allow. Names that Watchstep accepts contain none of the
characters that a policy gives a meaning (``*``, ``?``, ``$``).
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from watchstep.errors import ConfigError, StoreError
from watchstep.format.layout import (
    ENDS,
    RUN_DOCUMENT,
    SNAPSHOTS,
    attempt_document,
    check_name,
)
from watchstep_services.core.store_location import StorePlace, StoreRegistration

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


MOST_CHARACTERS = 2048
"""That AWS takes of a session policy."""

_ADDED = "s????/"
"""Segments (``stats/``), notes of checkpoints (``saved/``) and answers to stops (``stops/``) in one pattern, for a policy has no room for two: a ``?`` is one
character, so that what follows can only be the attempt."""

_CREATES_ONLY = {"Null": {"s3:if-none-match": "false"}}
"""The request says ``If-None-Match``, so that it replaces nothing."""


def project_policy(place: StorePlace) -> str:
    """What the service needs of a project: its objects, and no others.

    Raises:
        ConfigError: its names are too long for a session policy, or its store is not on S3.
    """
    bucket = _arn(place)
    change = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return _text(
        place,
        [
            _allow(change, f"{bucket}/{place.key}/*"),
            _allow("s3:ListBucket", bucket, {"StringLike": {"s3:prefix": f"{place.key}/*"}}),
            _ENCRYPTION,
        ],
    )


def attempt_policy(place: StorePlace, run: str, attempt: str) -> str:
    """What a recorder needs of one attempt: it makes the run and the attempt, adds statistics, and writes snapshots and ends.

    It reads and lists its own run, for its length's sake not only the attempt. What makes a run, an attempt or a segment
    cannot be replaced by it, nor removed.

    Raises:
        BadNameError: a name cannot be used.
        ConfigError: the names are too long for a session policy, or the store is not on S3.
    """
    bucket = _arn(place)
    check_name("attempt", attempt)
    within = f"{place.key}/{check_name('run', run)}"
    root = f"{bucket}/{within}"
    added, snapshots, ends = (f"{folder}{attempt}/*" for folder in (_ADDED, SNAPSHOTS, ENDS))
    made = [f"{root}/{key}" for key in (RUN_DOCUMENT, attempt_document(attempt), added)]
    changed = [f"{root}/{key}" for key in (snapshots, ends)]
    change = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return _text(
        place,
        [
            _allow("s3:PutObject", made, _CREATES_ONLY),
            _allow(change, changed),
            _allow("s3:GetObject", f"{root}/*"),
            _allow("s3:ListBucket", bucket, {"StringLike": {"s3:prefix": f"{within}/*"}}),
            _ENCRYPTION,
        ],
    )


def _arn(place: StorePlace) -> str:
    bucket, _ = place.registration.bucket_and_key
    named = place.registration.role_arn.split(":")
    return f"arn:{named[1] if len(named) > 1 else 'aws'}:s3:::{bucket}"


def _allow(action: Any, resource: Any, condition: dict[str, Any] | None = None) -> dict[str, Any]:
    held = {"Effect": "Allow", "Action": action, "Resource": resource}
    return held if condition is None else {**held, "Condition": condition}


_ENCRYPTION = _allow(
    ["kms:Decrypt", "kms:GenerateDataKey"], "*", {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com*"}}
)
"""Of a bucket that is encrypted by a key of its own: what S3 does with it for the session, if the role may."""


def _text(place: StorePlace, statements: list[dict[str, Any]]) -> str:
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"project {place.project!r}: a session policy of {len(text)} characters, {MOST_CHARACTERS} at the most",
            "use shorter names for the store's prefix, the project, the run or the attempt",
        )
    return text
