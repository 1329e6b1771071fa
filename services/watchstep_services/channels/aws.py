"""AWS for receivers: the service's own credentials, or a role that an admin has named; and which errors pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from watchstep.errors import ConfigError
from watchstep_services.channels.outside import DeliveryContext
from watchstep_services.channels.receiver import Receiver
from watchstep_services.core.due_action import AttemptResult

MOST_BYTES = 250_000
"""Of a message to SNS, SQS or EventBridge, attributes and all; AWS takes 262,144."""

ARN_PARTITION = r"arn:aws(?:-cn|-us-gov)?"
_SESSION = "watchstep-receivers"
_ROLE_SECONDS = 900

_PASSING = re.compile(
    r"Throttl|TooManyRequests|RequestLimitExceeded|InternalError|InternalFailure|InternalException|ServiceUnavailable|Timeout"
    r"|SlowDown|KMSThrottling|RequestExpired|ExpiredToken"
)

RoleArn = Annotated[
    str,
    StringConstraints(
        pattern=rf"^{ARN_PARTITION}:iam::[0-9]{{12}}:role/[A-Za-z0-9_+=,.@/-]+$", max_length=600
    ),
]


class AwsReceiver(Receiver):
    """What receivers in AWS share. They act with the service's rights, so that only admins write them."""

    administered = True

    role_arn: RoleArn | None = Field(
        None, description="Assumed for each message; else the service's own credentials."
    )
    external_id: Annotated[str, StringConstraints(min_length=2, max_length=1224)] | None = Field(
        None, description="Asked for by the role's trust policy."
    )


def region_of(arn: str) -> str:
    """The region that an ARN names."""
    return arn.split(":")[3]


def attempt(
    receiver: AwsReceiver,
    outside: DeliveryContext,
    service: str,
    region: str,
    call: Callable[[Any], AttemptResult],
) -> AttemptResult:
    """Make a client and call it.

    Args:
        receiver: whose role.
        outside: the way out.
        service: boto3's name of it.
        region: of the receiver.
        call: what to do with the client.

    Raises:
        ConfigError: boto3 is not installed.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ConfigError(
            f"receiver {receiver.name!r}: boto3 is not installed", "install watchstep[aws] for the service"
        ) from None
    try:
        return call(_client(receiver, outside, service, region))
    except ClientError as error:
        return failure(service, error.response)
    except BotoCoreError as error:
        return AttemptResult("error", f"{service}: {type(error).__name__}: {error}")


def failure(service: str, response: dict[str, Any]) -> AttemptResult:
    """What an error that AWS answered means."""
    error = response.get("Error", {})
    code, words = str(error.get("Code", "")), str(error.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{service}: {code}: {' '.join(words.split())[:300]}"
    if status >= 500 or status == 429 or passes(code):
        return AttemptResult("error", said)
    return AttemptResult("failed", f"{said}; AWS refuses it, so it is not sent again")


def passes(code: str) -> bool:
    """Whether an error by its code may pass by itself."""
    return _PASSING.search(code) is not None


def _client(receiver: AwsReceiver, outside: DeliveryContext, service: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    # One try: the outbox tries again, and each call has its part of the time.
    seconds = max(1.0, outside.seconds / 3)
    config = Config(
        connect_timeout=seconds, read_timeout=seconds, retries={"mode": "standard", "total_max_attempts": 1}
    )
    session = boto3.session.Session(region_name=region)
    if receiver.role_arn is None:
        return session.client(service, config=config)
    asked = {"RoleArn": receiver.role_arn, "RoleSessionName": _SESSION, "DurationSeconds": _ROLE_SECONDS}
    if receiver.external_id is not None:
        asked["ExternalId"] = receiver.external_id
    given = session.client("sts", config=config).assume_role(**asked)["Credentials"]
    return session.client(
        service,
        config=config,
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["SessionToken"],
    )
