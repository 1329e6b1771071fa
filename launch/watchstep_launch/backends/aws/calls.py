"""Calls of AWS by boto3: credentials, timeouts, errors, request fields and CloudWatch logs. Needs ``watchstep[aws]``."""

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
"""Key of the tag of jobs that launchers of Watchstep submitted."""

_CONNECT_SECONDS = 4
_READ_SECONDS = 8
_TRIES = 2

_PASSING = re.compile(
    r"Throttl|TooManyRequests|RequestLimitExceeded|InternalError|InternalFailure|InternalServer|ServerException"
    r"|ServiceUnavailable|Timeout|SlowDown"
)
_UNWELCOME = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|AccessDenied|NotAuthorized|UnauthorizedOperation|UnrecognizedClient"
    r"|InvalidClientTokenId|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidSignature|IncompleteSignature|MissingAuthenticationToken"
    r"|OptInRequired|InvalidIdentityToken"
)

Arn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:[a-z0-9-]+:[a-z0-9-]*:[0-9]*:\S+$", max_length=2048)]
RoleArn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+$", max_length=2048)]
S3Url = Annotated[str, Field(pattern=r"^s3://[a-z0-9.-]{3,63}(/.*)?$", max_length=1024)]


class AwsCallError(Exception):
    """AWS answered with an error that is about what was asked: ``code`` is its name of it, ``said`` its text."""

    def __init__(self, code: str, said: str) -> None:
        super().__init__(f"{code}: {said}")
        self.code = code
        self.said = said

    @property
    def means_missing(self) -> bool:
        """Whether it says that there is no such thing. SageMaker has no error of its own for that."""
        lacks = re.search(r"not found|not find|does not exist", self.said, re.IGNORECASE) is not None
        return self.code.startswith("ResourceNotFound") or (self.code.startswith("Validation") and lacks)


class Aws:
    """Calls of one account, by credentials that boto3 finds, or by a role that is taken with them. Safe from any thread.

    Args:
        region: where calls go that name none; boto3's own where it is empty.
        role: to take; empty for none.
        external_id: asked for by the role's trust policy; empty for none.
    """

    def __init__(self, region: str = "", role: str = "", external_id: str = "") -> None:
        self._region, self._role, self._external_id = region, role, external_id
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._session: Any = None
        self._account = ""
        self._lock = threading.Lock()

    def call(
        self, service: str, operation: str, *, region: str = "", once: bool = False, **asked: Any
    ) -> dict[str, Any]:
        """What an operation answers. The request is checked by botocore's model of the service before it is sent.

        Args:
            service: boto3's name of it.
            operation: boto3's name of it.
            region: where to.
            once: ask no second time, for what must not be done twice.
            asked: the operation's parameters.

        Raises:
            BackendDownError: no answer, or one that says that AWS cannot now.
            CredentialsExpiredError: there are none, they are refused, or they do not suffice.
            RefusedError: whatever else AWS or botocore refuses.
            ConfigError: boto3 is not installed, or no region is named.
        """
        try:
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise ConfigError(f"boto3 is not installed ({error})", "pip install 'watchstep[aws]'") from error
        place = f"AWS {service}"
        try:
            answer: dict[str, Any] = getattr(self._client(service, region, once), operation)(**asked)
        except ClientError as error:
            raise self._told(place, error.response) from error
        except (BotoCoreError, OSError) as error:
            raise self._untold(place, error) from error
        return answer

    def check_account(self, arn: str) -> None:
        """See that the credentials are of the account that an ARN names, before it is believed that something is not there.

        Raises:
            CredentialsExpiredError: they are another's.
            BackendDownError: nobody answers.
        """
        if not self._account:
            self._account = str(self.call("sts", "get_caller_identity", region=region_of(arn))["Account"])
        if self._account != (theirs := arn.split(":")[4]):
            account, self._account = self._account, ""
            self._forget()
            raise CredentialsExpiredError(
                f"{arn}: is of account {theirs}, and the credentials are of {account}",
                "use credentials of that account, or assume_role",
            )

    def _client(self, service: str, region: str, once: bool) -> Any:
        from botocore.config import Config

        with self._lock:
            if (held := self._clients.get((service, region, once))) is None:
                if self._session is None:
                    self._session = _session(self._region, self._role, self._external_id)
                config = Config(
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                    retries={"mode": "standard", "total_max_attempts": 1 if once else _TRIES},
                )
                held = self._session.client(service, region_name=region or None, config=config)
                self._clients[service, region, once] = held
            return held

    def _forget(self) -> None:
        """Look for credentials anew with the next call: a client keeps those that it was made with."""
        with self._lock:
            self._clients.clear()
            self._session = None

    def _told(self, place: str, response: Any) -> Exception:
        error = response.get("Error", {})
        code, said = str(error.get("Code", "")), " ".join(str(error.get("Message", "")).split())[:500]
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if _UNWELCOME.search(code) or code in ("401", "403"):
            return self._unwelcome(f"{place}: {code}: {said}")
        if status >= 500 or status == 429 or _PASSING.search(code):
            return BackendDownError(f"{place}: cannot now ({code}: {said})", "try again later")
        return AwsCallError(code, said)

    def _untold(self, place: str, error: Exception) -> Exception:
        from botocore import exceptions

        said = " ".join(str(error).split())[:500]
        if isinstance(error, exceptions.NoRegionError):
            return ConfigError(f"{place}: no region is named", "set region=, or AWS_DEFAULT_REGION")
        if isinstance(error, exceptions.ParamValidationError):
            return AwsCallError("ParamValidation", said)
        if isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError | OSError):
            return BackendDownError(f"{place}: does not answer ({said})", "see to the network, and try again")
        # Of what is left nearly all is about credentials: none, half of them, a profile, a sign-on that has run out.
        return self._unwelcome(f"{place}: {said}")

    def _unwelcome(self, said: str) -> CredentialsExpiredError:
        self._forget()
        return CredentialsExpiredError(said, "renew the credentials, or see to what their policies allow")


class AwsModel(BackendModel):
    """What the backends on AWS share: whose calls they are."""

    region: str = Field(
        "",
        pattern=r"^[a-z0-9-]*$",
        max_length=40,
        description="Region of the jobs; boto3's own where it is empty.",
    )
    assume_role: RoleArn | None = Field(
        None, description="Role by which the launcher or the service acts; else boto3's own credentials."
    )
    external_id: str = Field("", max_length=1224, description="Asked for by that role's trust policy.")
    _held: Aws | None = PrivateAttr(None)
    _making: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def aws(self) -> Aws:
        """Calls of AWS, with what is set here."""
        with self._making:
            if self._held is None:
                self._held = Aws(self.region, self.assume_role or "", self.external_id)
            return self._held


def region_of(arn: str) -> str:
    """The region that an ARN names; empty where it is none."""
    return parts[3] if len(parts := arn.split(":", 5)) == 6 else ""


def milliseconds(time: Any) -> int:
    """A time as boto3 gives it, or in milliseconds already, in milliseconds since 1970."""
    return int(time) if isinstance(time, int) else round(time.timestamp() * 1000)


def _session(region: str, role: str, external_id: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.credentials import DeferredRefreshableCredentials, create_assume_role_refresher

    own = boto3.Session(botocore_session=_core(), region_name=region or None)
    if not role:
        return own
    asked = {"RoleArn": role, "RoleSessionName": "watchstep-jobs"}
    if external_id:
        asked["ExternalId"] = external_id
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
    )
    refresh = create_assume_role_refresher(own.client("sts", config=config), asked)
    taken = _core()
    taken._credentials = DeferredRefreshableCredentials(  # noqa: SLF001 - boto3 has no other way in
        refresh_using=refresh, method="sts-assume-role"
    )
    return boto3.Session(botocore_session=taken, region_name=own.region_name)


def _core() -> Any:
    """A session of botocore's; the models of services, which take half a second of a processor to read, are read once."""
    import botocore.session

    made = botocore.session.get_session()
    made.register_component("data_loader", _loader())
    return made


@functools.cache
def _loader() -> Any:
    import botocore.loaders

    return botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))


def identity_of(job: JobHandle, backend: str) -> dict[str, Any]:
    """What tells a job from all others with its name: its ARN, and when it was created, in milliseconds.

    Raises:
        ConfigError: the handle is none of this backend's.
    """
    try:
        return {"arn": str(job.identity["arn"]), "created": int(job.identity["created"])}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: its identity is none of {backend}'s ({error!r})",
            f"bind it with arn and created, in milliseconds, as {backend}.reattach gives them",
        ) from error


def without_empty(value: Any) -> Any:
    """A request without what is not set: None, False, and lists and objects of nothing."""
    if not isinstance(value, dict):
        return value
    kept = {name: without_empty(held) for name, held in value.items()}
    return {name: held for name, held in kept.items() if not _is_nothing(held)}


def merged(value: Any, more: Any) -> Any:
    """A request with what else is to be in it: objects become one, anything else takes the place of what was there."""
    if not (isinstance(value, Mapping) and isinstance(more, Mapping)):
        return more
    return {**value, **{name: merged(value.get(name), held) for name, held in more.items()}}


def of_container(code: int) -> int:
    """An exit code with signals as negative numbers: a container that ends by one has 128 and its number."""
    return 128 - code if 128 < code < 160 else code


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])


_SECONDS = 15.0


class _Place(NamedTuple):
    """Where reading of a stream goes on.

    Attributes:
        token: CloudWatch's. It is good for a day.
        written: when the last line that was read was written, in milliseconds.
        since: what the token's pages begin at, in the same; 0 for the stream's beginning.
    """

    token: str
    written: int
    since: int


def streams_below(aws: Aws, region: str, group: str, prefix: str) -> list[str]:
    """The streams of a group whose names begin so; none where the group is not there yet."""
    found: list[str] = []
    asked: dict[str, Any] = {}
    while True:
        try:
            page = aws.call(
                "logs", "describe_log_streams", region=region, logGroupName=group, logStreamNamePrefix=prefix, **asked
            )  # fmt: skip
        except AwsCallError as error:
            if error.means_missing:
                return found
            raise
        found += [str(stream["logStreamName"]) for stream in page.get("logStreams", [])]
        if not page.get("nextToken"):
            return sorted(found)
        asked = {"nextToken": str(page["nextToken"])}


def read_streams(
    aws: Aws,
    region: str,
    group: str,
    streams: Iterable[str],
    cursor: str,
    label: Callable[[str], str] = lambda _: "",
) -> LogPart:
    """What streams hold beyond a place: one after another, a megabyte at most, each line ended by a newline.

    Args:
        aws: calls it.
        region: of the group.
        group: of the streams.
        streams: their names.
        cursor: where the last part ended.
        label: what stands before each line of a stream.
    """
    places, data = _places(cursor), bytearray()
    deadline = time.monotonic() + _SECONDS
    for stream in streams:
        before = label(stream)
        for message in _messages(aws, region, group, stream, places):
            data += "".join(f"{before}{line}\n" for line in message.split("\n")).encode()
        if len(data) >= LARGEST_PART or time.monotonic() >= deadline:
            break
    return LogPart(bytes(data), json.dumps(places) if places else cursor)


def _messages(aws: Aws, region: str, group: str, stream: str, places: dict[str, _Place]) -> Iterator[str]:
    """Messages beyond a stream's place, which is moved on with each page."""
    size = 0
    deadline = time.monotonic() + _SECONDS
    while size < LARGEST_PART and time.monotonic() < deadline:
        place = places.get(stream)
        try:
            page, since = _page(aws, region, group, stream, place)
        except AwsCallError as error:
            if error.means_missing:
                return
            raise
        token = str(page["nextForwardToken"])
        if place is not None and token == place.token:  # CloudWatch's sign for the end; no empty page is one
            return
        written = max(
            (event.get("timestamp", 0) for event in page["events"]), default=place.written if place else 0
        )
        places[stream] = _Place(token, written, since)
        for event in page["events"]:
            size += len(event["message"])
            yield str(event["message"])


def _page(aws: Aws, region: str, group: str, stream: str, place: _Place | None) -> tuple[dict[str, Any], int]:
    """A page, and what it and those behind it begin at."""
    asked: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    if place is None:
        return aws.call("logs", "get_log_events", region=region, **asked), 0
    since: dict[str, Any] = {"startTime": place.since} if place.since else {}
    try:
        page = aws.call("logs", "get_log_events", region=region, **asked, **since, nextToken=place.token)
    except AwsCallError as error:
        if not error.code.startswith("InvalidParameter"):
            raise
        begun = place.written + 1  # the token is too old
        return aws.call("logs", "get_log_events", region=region, **asked, startTime=begun), begun
    return page, place.since


def _places(cursor: str) -> dict[str, _Place]:
    try:
        held = json.loads(cursor) if cursor else {}
        return {str(name): _Place(str(one[0]), int(one[1]), int(one[2])) for name, one in held.items()}
    except (ValueError, TypeError, AttributeError, IndexError):
        return {}
