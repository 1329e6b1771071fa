"""The project's role on AWS, and session policies that restrict it to one project or one attempt.

AWS allows a session what both the role's policies and the session's policy allow. Names that Watchstep accepts contain none of the
characters with a meaning in policies (``*``, ``?``, ``$``).
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
    TRACES,
    attempt_document,
    check_name,
)
from watchstep_services.core.store_location import StorePlace, StoreRegistration

SESSION_SECONDS = 3600
"""Limit of AWS for a role that is assumed by another role."""

_NAME = re.compile(r"[^A-Za-z0-9_=,.@-]")


class RoleCredentials:
    """Credential provider for obstore, which calls it some minutes before the credentials expire. Thread-safe.

    If the role is refused, no other credentials are used, in particular not the service's own.
    """

    def __init__(self, registration: StoreRegistration, policy: str, session_name: str) -> None:
        """Create it without a request.

        Args:
            registration: the store, with a role.
            policy: the session policy.
            session_name: the session's name in AWS's audit log.
        """
        self._registration = registration
        self._policy = policy
        self._session_name = _NAME.sub("-", session_name)[:64]
        self._lock = threading.Lock()
        self._client: Any = None

    def __call__(self) -> dict[str, Any]:
        """Request new credentials.

        Raises:
            StoreError: the role is refused, or AWS does not answer.
            ConfigError: boto3 is not installed.
        """
        with self._lock:
            self._client = self._client or _sts(self._registration)
        credentials = _assume(self._client, self._registration, self._policy, self._session_name)
        expires: datetime = credentials["Expiration"]
        return {
            "access_key_id": str(credentials["AccessKeyId"]),
            "secret_access_key": str(credentials["SecretAccessKey"]),
            "token": str(credentials["SessionToken"]),
            "expires_at": expires.astimezone(timezone.utc),  # the only time zone that obstore accepts
        }


def _sts(registration: StoreRegistration) -> Any:
    try:
        import boto3  # noqa: F401 - checks that it is installed
    except ImportError as error:
        raise ConfigError(
            f"store {registration.url}: has a role, and boto3 is not installed",
            "install watchstep[aws] on the service's machine",
        ) from error
    from botocore.exceptions import BotoCoreError

    try:
        return _client(registration.region, os.environ.get("AWS_ENDPOINT_URL", ""))
    except BotoCoreError as error:
        raise _no_answer(registration, error) from error


@functools.lru_cache(maxsize=64)  # creating one takes half a second of processor time
def _client(region: str, _endpoint: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoCredentialsError

    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 3, "mode": "standard"})
    session = boto3.Session()
    if session.get_credentials() is None:  # the client would never get any
        raise NoCredentialsError
    return session.client("sts", region_name=region or session.region_name or "us-east-1", config=config)


def _assume(
    client: Any, registration: StoreRegistration, policy: str, session_name: str
) -> Mapping[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    parameters: dict[str, Any] = {
        "RoleArn": registration.role_arn,
        "RoleSessionName": session_name,
        "Policy": policy,
        "DurationSeconds": SESSION_SECONDS,
    }
    if registration.external_id:
        parameters["ExternalId"] = registration.external_id
    try:
        credentials: Mapping[str, Any] = client.assume_role(**parameters)["Credentials"]
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "refused"))
        raise StoreError(
            f"store {registration.url}: role {registration.role_arn} cannot be assumed ({code})",
            "have the role trust the service's own identity, with the registered external id",
        ) from error
    except BotoCoreError as error:
        raise _no_answer(registration, error) from error
    return credentials


def _no_answer(registration: StoreRegistration, error: Exception) -> StoreError:
    return StoreError(
        f"store {registration.url}: role {registration.role_arn} cannot be assumed ({type(error).__name__})",
        "check that the service has AWS credentials of its own, and that it can reach STS",
    )


@dataclass(frozen=True)
class ScopedCredentials:
    """Credentials of a recorder for its attempt.

    Attributes:
        access_key_id: AWS access key id.
        secret_access_key: AWS secret access key; never logged or represented.
        session_token: AWS session token; never logged or represented.
        expires_at: expiry, with a time zone.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


def scoped_credentials(place: StorePlace, run: str, attempt: str) -> ScopedCredentials:
    """Assume the store's role, restricted to the objects of one attempt.

    Raises:
        BadNameError: a name is not valid.
        ConfigError: the store has no role, or the names are too long for a session policy.
        StoreError: the role is refused.
    """
    if not place.registration.role_arn:
        raise ConfigError(
            f"project {place.project!r}: its store has no role for credentials",
            "register the store with a role, or give the recorder credentials of its own",
        )
    policy = attempt_policy(place, run, attempt)
    credentials = RoleCredentials(place.registration, policy, f"watchstep-{place.project}-{run}")()
    return ScopedCredentials(
        credentials["access_key_id"],
        credentials["secret_access_key"],
        credentials["token"],
        credentials["expires_at"],
    )


MOST_CHARACTERS = 2048
"""Limit of AWS for a session policy."""

_ADDED = "s????/"
"""Segments (``stats/``), notes of checkpoints (``saved/``) and answers to stops (``stops/``) in one pattern, because a policy has no room
for several. A ``?`` is one character, so the next part can only be the attempt."""

_LARGE = "??????s/"
"""Snapshots (``tensors/``), bundles (``bundles/``), samples (``samples/``) and steps before a failure (``flights/``) in one pattern. ``journal/``, of the service, does not match."""

_CREATES_ONLY = {"Null": {"s3:if-none-match": "false"}}
"""Requires ``If-None-Match`` in the request, so that it replaces nothing."""


def project_policy(place: StorePlace) -> str:
    """The permissions of the service on a project: on its objects only.

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
    """The permissions of a recorder on one attempt: create the run and the attempt, add statistics, write snapshots, bundles, samples, traces and ends.

    It may read and list its own run, not only the attempt, to keep the policy short. It cannot replace or delete documents of runs or
    attempts, or segments.

    Raises:
        BadNameError: a name is not valid.
        ConfigError: the names are too long for a session policy, or the store is not on S3.
    """
    bucket = _arn(place)
    check_name("attempt", attempt)
    within = f"{place.key}/{check_name('run', run)}"
    root = f"{bucket}/{within}"
    added, *large = (f"{folder}{attempt}/*" for folder in (_ADDED, _LARGE, TRACES, ENDS))
    created = [f"{root}/{key}" for key in (RUN_DOCUMENT, attempt_document(attempt), added)]
    changed = [f"{root}/{key}" for key in large]
    change = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return _text(
        place,
        [
            _allow("s3:PutObject", created, _CREATES_ONLY),
            _allow(change, changed),
            _allow("s3:GetObject", f"{root}/*"),
            _allow("s3:ListBucket", bucket, {"StringLike": {"s3:prefix": f"{within}/*"}}),
            _ENCRYPTION,
        ],
    )


def _arn(place: StorePlace) -> str:
    bucket, _ = place.registration.bucket_and_key
    arn = place.registration.role_arn.split(":")
    return f"arn:{arn[1] if len(arn) > 1 else 'aws'}:s3:::{bucket}"


def _allow(action: Any, resource: Any, condition: dict[str, Any] | None = None) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": action, "Resource": resource}
    return statement if condition is None else {**statement, "Condition": condition}


_ENCRYPTION = _allow(
    ["kms:Decrypt", "kms:GenerateDataKey"], "*", {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com*"}}
)
"""For a bucket with its own encryption key: what S3 does with the key for the session, if the role may."""


def _text(place: StorePlace, statements: list[dict[str, Any]]) -> str:
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"project {place.project!r}: a session policy of {len(text)} characters; the limit is {MOST_CHARACTERS}",
            "use shorter names for the store's prefix, the project, the run or the attempt",
        )
    return text
