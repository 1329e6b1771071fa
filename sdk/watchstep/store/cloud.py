"""Access to objects in a cloud: endpoint, region and credentials, as boto3 finds them or as the caller passes them."""

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
    """Access to a bucket independent of the environment. Empty values are taken from the environment.

    Attributes:
        credentials: Returns ``access_key_id``, ``secret_access_key``, ``token`` and ``expires_at`` (a `datetime` in UTC)
            whenever the current ones are about to expire. May be called from any thread.
        region: Region of the bucket.
        endpoint: Endpoint of a service with the S3 protocol.
        hides_missing: Whether a missing object is reported as access denied, as S3 does for credentials without permission to list.
    """

    credentials: Callable[[], Mapping[str, Any]] | None = None
    region: str = ""
    endpoint: str = ""
    hides_missing: bool = False


def cloud_backend(url: str, scheme: str, access: S3Access | None) -> Any:
    """Return obstore's store at a URL.

    Raises:
        ConfigError: The URL is not of a bucket, or S3 access was passed for another cloud.
    """
    from obstore.store import from_url

    client: Any = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5)}
    retry: Any = {"max_retries": 3, "retry_timeout": _RETRY_TIMEOUT}
    options: Any = {}
    if scheme in {"s3", "s3a"}:
        options = _s3_options(client, access or S3Access())
    elif access is not None:
        raise ConfigError(
            f"store {url!r}: credentials for S3 were passed for another cloud",
            "omit them, or use an s3:// URL",
        )
    try:
        return from_url(url, client_options=client, retry_config=retry, **options)
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
        raise ConfigError(f"store {url!r}: {reason}", "correct the URL, e.g. s3://bucket/prefix") from error


def load_libraries(scheme: str) -> None:
    """Import the modules that `cloud_backend` needs for a scheme, so that it imports nothing later on another thread."""
    if scheme in {"s3", "s3a"}:
        with contextlib.suppress(ImportError):
            import boto3  # noqa: F401
            import obstore.auth.boto3  # noqa: F401


def _s3_options(client: Any, access: S3Access) -> dict[str, Any]:
    """Return endpoint and credentials as boto3 would find them, or of obstore's own chain if boto3 is not installed."""
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
        # The environment is not used: if these fail, no others are tried.
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
    """Return the region as boto3 finds it, S3's first region by default."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named:
        return named
    try:
        import boto3
    except ImportError:
        return "us-east-1"
    return boto3.Session().region_name or "us-east-1"
