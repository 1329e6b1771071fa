"""How objects in a cloud are reached: endpoint, region and credentials, as boto3 finds them or as somebody gives them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REQUEST_TIMEOUT = timedelta(seconds=10)
_RETRY_TIMEOUT = timedelta(seconds=15)


@dataclass(frozen=True)
class S3Access:
    """How a bucket is reached where the environment shall not say so. What is empty, the environment says.

    Attributes:
        credentials: gives ``access_key_id``, ``secret_access_key``, ``token`` and ``expires_at`` (a `datetime` in UTC)
            whenever those that are held are about to expire; may be called from any thread.
        region: of the bucket.
        endpoint: of a service that speaks S3.
        hides_missing: these credentials are refused what is not there, as S3 does with those that may not list.
    """

    credentials: Callable[[], Mapping[str, Any]] | None = None
    region: str = ""
    endpoint: str = ""
    hides_missing: bool = False


def cloud_backend(url: str, scheme: str, access: S3Access | None) -> Any:
    """Obstore's store at a URL.

    Raises:
        ConfigError: the URL is none of a bucket's, or S3 is described and it is another cloud.
    """
    from obstore.store import from_url

    client: Any = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5)}
    retry: Any = {"max_retries": 3, "retry_timeout": _RETRY_TIMEOUT}
    options: Any = {}
    if scheme in {"s3", "s3a"}:
        options = _s3_options(client, access or S3Access())
    elif access is not None:
        raise ConfigError(
            f"store {url!r}: credentials for S3 were given", "leave them out: this is another cloud"
        )
    try:
        return from_url(url, client_options=client, retry_config=retry, **options)
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
        raise ConfigError(f"store {url!r}: {reason}", "correct the URL, e.g. s3://bucket/prefix") from error


def load_libraries(scheme: str) -> None:
    """Import what `cloud_backend` imports for a scheme, so that it imports nothing later, on another thread."""
    if scheme in {"s3", "s3a"}:
        with contextlib.suppress(ImportError):
            import boto3  # noqa: F401
            import obstore.auth.boto3  # noqa: F401


def _s3_options(client: Any, access: S3Access) -> dict[str, Any]:
    """Endpoint and credentials as boto3 would find them; obstore's own chain where boto3 is not installed."""
    options: dict[str, Any] = {}
    endpoint = access.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["endpoint"] = endpoint
        options["virtual_hosted_style_request"] = False
        if endpoint.startswith("http://"):
            client["allow_http"] = True
    if access.region:
        options["region"] = access.region
    if access.credentials is not None:
        # Nothing of the environment: where these fail, no others are tried.
        options["credential_provider"] = access.credentials
        options.setdefault("region", _region())
        return options
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return options
    session = boto3.Session()
    if session.region_name:
        options.setdefault("region", session.region_name)
    if session.get_credentials() is not None:
        options["credential_provider"] = Boto3CredentialProvider(session)
    return options


def _region() -> str:
    """As boto3 finds it; S3's first where nothing names one."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named:
        return named
    try:
        import boto3
    except ImportError:
        return "us-east-1"
    return boto3.Session().region_name or "us-east-1"
