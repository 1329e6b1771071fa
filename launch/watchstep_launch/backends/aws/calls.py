"""Calls of AWS through boto3: credentials, timeouts, errors, request fields and CloudWatch logs. Requires ``watchstep[aws]``."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PrivateAttr

from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    LARGEST_PART,
    BackendDownError,
    BackendModel,
    CredentialsExpiredError,
    JobHandle,
    LogPart,
)

MARK = "watchstep"
"""Tag key of jobs that Watchstep submitted."""

_CONNECT_SECONDS = 4
_READ_SECONDS = 8
_MAX_ATTEMPTS = 2

_TRANSIENT = re.compile(
    r"Throttl|TooManyRequests|RequestLimitExceeded|InternalError|InternalFailure|InternalServer|ServerException"
    r"|ServiceUnavailable|Timeout|SlowDown"
)
_CREDENTIAL_ERRORS = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|AccessDenied|NotAuthorized|UnauthorizedOperation|UnrecognizedClient"
    r"|InvalidClientTokenId|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidSignature|IncompleteSignature|MissingAuthenticationToken"
    r"|OptInRequired|InvalidIdentityToken"
)

Arn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:[0-9]*:\S+$", max_length=2048)]
RoleArn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+$", max_length=2048)]
S3Url = Annotated[str, Field(pattern=r"^s3://[a-z0-9.-]{3,63}(/.*)?$", max_length=1024)]


class AwsCallError(Exception):
    """AWS refused the request itself: ``code`` is its error code, ``message`` its text."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    @property
    def is_missing(self) -> bool:
        """Whether the requested object does not exist. SageMaker has no separate error code for that."""
        lacks = re.search(r"not found|not find|does not exist", self.message, re.IGNORECASE) is not None
        return self.code.startswith("ResourceNotFound") or (self.code.startswith("Validation") and lacks)


class Aws:
    """Calls of one AWS account, with credentials that boto3 finds, or with a role assumed by them. Thread-safe.

    Args:
        region: default region; if empty, boto3's own.
        role: role to assume; empty for none.
        external_id: required by the role's trust policy; empty for none.
    """

    def __init__(self, region: str = "", role: str = "", external_id: str = "") -> None:
        self._region, self._role, self._external_id = region, role, external_id
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._session: Any = None
        self._account = ""
        self._lock = threading.Lock()

    def call(
        self, service: str, operation: str, *, region: str = "", once: bool = False, **parameters: Any
    ) -> dict[str, Any]:
        """Call an operation and return its response. botocore validates the request by its model of the service before it is sent.

        Args:
            service: boto3's name of the service.
            operation: boto3's name of the operation.
            region: region of the call.
            once: do not retry; for operations that must not be done twice.
            parameters: the operation's parameters.

        Raises:
            BackendDownError: AWS does not answer, or reports that it is unavailable.
            CredentialsExpiredError: credentials are missing, refused or insufficient.
            AwsCallError: AWS or botocore refuses the request for another reason.
            ConfigError: boto3 is not installed, or no region is set.
        """
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise ConfigError(f"boto3 is not installed ({error})", "pip install 'watchstep[aws]'") from error
        service_name = f"AWS {service}"
        try:
            response: dict[str, Any] = getattr(self._client(service, region, once), operation)(**parameters)
        except ClientError as error:
            raise self._response_error(service_name, error.response) from error
        except (BotoCoreError, OSError) as error:
            raise self._client_error(service_name, error) from error
        return response

    def check_account(self, arn: str) -> None:
        """Check that the credentials belong to the account of an ARN. Otherwise a missing object would mean nothing.

        Raises:
            CredentialsExpiredError: they belong to another account.
            BackendDownError: AWS does not answer.
        """
        if not self._account:
            self._account = str(self.call("sts", "get_caller_identity", region=region_of(arn))["Account"])
        if self._account != (expected := arn.split(":")[4]):
            account, self._account = self._account, ""
            self._forget()
            raise CredentialsExpiredError(
                f"{arn} is in account {expected}, but the credentials belong to account {account}",
                "use credentials of that account, or assume_role",
            )

    def _client(self, service: str, region: str, once: bool) -> Any:
        from botocore.config import Config

        with self._lock:
            if (client := self._clients.get((service, region, once))) is None:
                if self._session is None:
                    self._session = _session(self._region, self._role, self._external_id)
                config = Config(
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                    retries={"mode": "standard", "total_max_attempts": 1 if once else _MAX_ATTEMPTS},
                )
                client = self._session.client(service, region_name=region or None, config=config)
                self._clients[service, region, once] = client
            return client

    def _forget(self) -> None:
        """Discard clients, so that the next call loads credentials again."""
        with self._lock:
            self._clients.clear()
            self._session = None

    def _response_error(self, service_name: str, response: Any) -> Exception:
        error = response.get("Error", {})
        code, message = str(error.get("Code", "")), " ".join(str(error.get("Message", "")).split())[:500]
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if _CREDENTIAL_ERRORS.search(code) or code in ("401", "403"):
            return self._credentials_error(f"{service_name}: {code}: {message}")
        if status >= 500 or status == 429 or _TRANSIENT.search(code):
            return BackendDownError(f"{service_name} is unavailable ({code}: {message})", "try again later")
        return AwsCallError(code, message)

    def _client_error(self, service_name: str, error: Exception) -> Exception:
        from botocore import exceptions

        message = " ".join(str(error).split())[:500]
        if isinstance(error, exceptions.NoRegionError):
            return ConfigError(f"{service_name}: no region is set", "set region=, or AWS_DEFAULT_REGION")
        if isinstance(error, exceptions.ParamValidationError):
            return AwsCallError("ParamValidation", message)
        if isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError | OSError):
            return BackendDownError(
                f"{service_name} does not answer ({message})", "check the network, and try again"
            )
        # Nearly all other errors concern credentials: missing, incomplete, a wrong profile, an expired sign-on.
        return self._credentials_error(f"{service_name}: {message}")

    def _credentials_error(self, message: str) -> CredentialsExpiredError:
        self._forget()
        return CredentialsExpiredError(message, "renew the credentials, or check their policies")


class AwsModel(BackendModel):
    """Settings that all AWS backends share."""

    region: str = Field(
        "",
        pattern=r"^[a-z0-9-]*$",
        max_length=40,
        description="Region of the jobs; if empty, boto3's default.",
    )
    assume_role: RoleArn | None = Field(
        None, description="Role that the launcher or the service assumes; by default boto3's own credentials."
    )
    external_id: str = Field(
        "", max_length=1224, description="External id that the role's trust policy requires."
    )
    _aws: Aws | None = PrivateAttr(None)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def aws(self) -> Aws:
        """Return the AWS client with these settings."""
        with self._lock:
            if self._aws is None:
                self._aws = Aws(self.region, self.assume_role or "", self.external_id)
            return self._aws


def region_of(arn: str) -> str:
    """Return the region in an ARN; empty if the text is not an ARN."""
    return parts[3] if len(parts := arn.split(":", 5)) == 6 else ""


def milliseconds(time: Any) -> int:
    """Convert boto3's time, or a time in milliseconds, to milliseconds since 1970."""
    return int(time) if isinstance(time, int) else round(time.timestamp() * 1000)


def _session(region: str, role: str, external_id: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.credentials import DeferredRefreshableCredentials, create_assume_role_refresher

    base = boto3.Session(botocore_session=_core(), region_name=region or None)
    if not role:
        return base
    parameters = {"RoleArn": role, "RoleSessionName": "watchstep-jobs"}
    if external_id:
        parameters["ExternalId"] = external_id
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
    )
    refresh = create_assume_role_refresher(base.client("sts", config=config), parameters)
    assumed = _core()
    assumed._credentials = DeferredRefreshableCredentials(  # noqa: SLF001 - boto3 has no public API for this
        refresh_using=refresh, method="sts-assume-role"
    )
    return boto3.Session(botocore_session=assumed, region_name=base.region_name)


def _core() -> Any:
    """Create a botocore session with a shared loader: reading the service models takes half a second of CPU time."""
    import botocore.session

    session = botocore.session.get_session()
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    import botocore.loaders

    return botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))


def identity_of(job: JobHandle, backend: str) -> dict[str, Any]:
    """Return a job's identity, which distinguishes it from other jobs with its name: ARN and creation time in milliseconds.

    Raises:
        ConfigError: the identity is not one of this backend.
    """
    try:
        return {"arn": str(job.identity["arn"]), "created": int(job.identity["created"])}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: the identity is not a {backend} identity ({error!r})",
            f"use arn and created, in milliseconds, as {backend}.reattach returns them",
        ) from error


def without_empty(value: Any) -> Any:
    """Return a request without fields that are not set: None, False, and empty lists and objects."""
    if not isinstance(value, dict):
        return value
    fields = {name: without_empty(field) for name, field in value.items()}
    return {name: field for name, field in fields.items() if not _is_nothing(field)}


def merged(value: Any, more: Any) -> Any:
    """Merge further fields into a request: objects are merged recursively, other values are replaced."""
    if not (isinstance(value, Mapping) and isinstance(more, Mapping)):
        return more
    return {**value, **{name: merged(value.get(name), field) for name, field in more.items()}}


def of_container(code: int) -> int:
    """Convert a container's exit code, which is 128 plus the number after a signal, to a negative number for a signal."""
    return 128 - code if 128 < code < 160 else code


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])


_SECONDS = 15.0


class _Position(NamedTuple):
    """Where reading of a stream continues.

    Attributes:
        token: CloudWatch's token, valid for a day.
        written: time of the last line that was read, in milliseconds.
        since: start time of the token's pages, in milliseconds; 0 for the stream's beginning.
    """

    token: str
    written: int
    since: int


def streams_below(aws: Aws, region: str, group: str, prefix: str) -> list[str]:
    """List a group's streams whose names have a prefix; empty if the group does not exist yet."""
    streams: list[str] = []
    parameters: dict[str, Any] = {}
    while True:
        try:
            page = aws.call(
                "logs", "describe_log_streams", region=region, logGroupName=group, logStreamNamePrefix=prefix, **parameters
            )  # fmt: skip
        except AwsCallError as error:
            if error.is_missing:
                return streams
            raise
        streams += [str(stream["logStreamName"]) for stream in page.get("logStreams", [])]
        if not page.get("nextToken"):
            return sorted(streams)
        parameters = {"nextToken": str(page["nextToken"])}


def read_streams(
    aws: Aws,
    region: str,
    group: str,
    streams: Iterable[str],
    cursor: str,
    label: Callable[[str], str] = lambda _: "",
) -> LogPart:
    """Read streams after a cursor, one after another, about a megabyte at most; each line ends with a newline.

    Args:
        aws: the AWS client.
        region: region of the group.
        group: the log group.
        streams: names of the streams.
        cursor: end of the previous part.
        label: returns the prefix for each line of a stream.
    """
    positions, data = _positions(cursor), bytearray()
    deadline = time.monotonic() + _SECONDS
    for stream in streams:
        prefix = label(stream)
        for message in _messages(aws, region, group, stream, positions):
            data += "".join(f"{prefix}{line}\n" for line in message.split("\n")).encode()
        if len(data) >= LARGEST_PART or time.monotonic() >= deadline:
            break
    return LogPart(bytes(data), json.dumps(positions) if positions else cursor)


def _messages(
    aws: Aws, region: str, group: str, stream: str, positions: dict[str, _Position]
) -> Iterator[str]:
    """Yield messages after a stream's position, which advances with each page."""
    size = 0
    deadline = time.monotonic() + _SECONDS
    while size < LARGEST_PART and time.monotonic() < deadline:
        position = positions.get(stream)
        try:
            page, since = _page(aws, region, group, stream, position)
        except AwsCallError as error:
            if error.is_missing:
                return
            raise
        token = str(page["nextForwardToken"])
        if position is not None and token == position.token:  # this marks the end; an empty page does not
            return
        written = max(
            (event.get("timestamp", 0) for event in page["events"]),
            default=position.written if position else 0,
        )
        positions[stream] = _Position(token, written, since)
        for event in page["events"]:
            size += len(event["message"])
            yield str(event["message"])


def _page(
    aws: Aws, region: str, group: str, stream: str, position: _Position | None
) -> tuple[dict[str, Any], int]:
    """Return a page, and the start time of it and the following pages."""
    parameters: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    if position is None:
        return aws.call("logs", "get_log_events", region=region, **parameters), 0
    since: dict[str, Any] = {"startTime": position.since} if position.since else {}
    try:
        page = aws.call(
            "logs", "get_log_events", region=region, **parameters, **since, nextToken=position.token
        )
    except AwsCallError as error:
        if not error.code.startswith("InvalidParameter"):
            raise
        since_last = position.written + 1  # the token is too old
        return aws.call(
            "logs", "get_log_events", region=region, **parameters, startTime=since_last
        ), since_last
    return page, position.since


def _positions(cursor: str) -> dict[str, _Position]:
    try:
        entries = json.loads(cursor) if cursor else {}
        return {
            str(name): _Position(str(entry[0]), int(entry[1]), int(entry[2]))
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, AttributeError, IndexError):
        return {}
