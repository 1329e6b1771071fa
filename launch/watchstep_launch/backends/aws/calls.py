"""Calls of AWS by boto3: whose they are, how long they may take, and their refusals told apart. Needs ``watchstep[aws]``."""

from __future__ import annotations

import functools
import os
import re
import threading
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from watchstep.errors import ConfigError
from watchstep_launch.backend import BackendModel, JobHandle
from watchstep_launch.errors import BackendDownError, CredentialsExpiredError

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
