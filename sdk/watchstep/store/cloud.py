"""Access to objects in a cloud: endpoint, region and credentials, as boto3 finds them or as the caller passes them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from watchstep.errors import ConfigError
from watchstep.store.errors import PROVIDERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ALLOW_HTTP = "WATCHSTEP_ALLOW_HTTP"
"""Allows plain HTTP to endpoints of GCS and Azure on other machines."""

_URL_HINTS = {
    "s3": "correct the URL, e.g. s3://bucket/prefix",
    "gs": "correct the URL, e.g. gs://bucket/prefix, or the GOOGLE_… variables",
    "az": "correct the URL, e.g. az://container/prefix, or set AZURE_STORAGE_ACCOUNT_NAME",
}
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
        ConfigError: The URL is not of a bucket, its endpoint is plain HTTP that is not allowed, or S3 access was passed for another cloud.
    """
    from obstore.store import from_url

    provider = PROVIDERS[scheme]
    if access is not None and provider != "s3":
        raise ConfigError(
            f"store {url!r}: credentials for S3 were passed for another cloud",
            "omit them, or use an s3:// URL",
        )
    client: Any = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5)}
    retry: Any = {"max_retries": 3, "retry_timeout": _RETRY_TIMEOUT}
    if provider == "s3":
        options = _s3_options(client, access or S3Access())
    elif provider == "gs":
        options = _gcs_options(url, client)
    else:
        options = _azure_options(url, client)
    try:
        return from_url(url, client_options=client, retry_config=retry, **options)
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
        raise ConfigError(
            f"store {url!r}: {reason}",
            _URL_HINTS[provider],
        ) from error


def load_libraries(scheme: str) -> None:
    """Import the modules that `cloud_backend` needs for a scheme, so that it imports nothing later on another thread."""
    if PROVIDERS.get(scheme) == "s3":
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


def _gcs_options(url: str, client: Any) -> dict[str, Any]:
    """Return the endpoint of GCS where it is not Google's.

    An emulator gets no credentials of the user. obstore would look for some before it writes.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        client["allow_http"] = True
        base = emulator if "://" in emulator else f"http://{emulator}"
        return {"base_url": base.rstrip("/"), "credential_provider": _emulator_token}
    endpoint = os.environ.get("GOOGLE_BASE_URL") or _endpoint_of_service_account()
    _allow_http(url, endpoint, client)
    return {}


def _emulator_token() -> dict[str, Any]:
    return {"token": "emulator", "expires_at": None}


def _endpoint_of_service_account() -> str:
    """Return the endpoint that the key of a service account names; empty if it names none. obstore reports keys that cannot be read."""
    document = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    path = os.environ.get("GOOGLE_SERVICE_ACCOUNT") or os.environ.get("GOOGLE_SERVICE_ACCOUNT_PATH")
    with contextlib.suppress(OSError, ValueError):
        key = json.loads(Path(path).read_text(encoding="utf-8") if path else document)
        return str(key.get("gcs_base_url") or "") if isinstance(key, dict) else ""
    return ""


def _azure_options(url: str, client: Any) -> dict[str, Any]:
    """Return nothing: obstore reads the endpoint and credentials of Azure from the environment, and those of an emulator."""
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
    _allow_http(url, endpoint, client)
    return {}


def _allow_http(url: str, endpoint: str | None, client: Any) -> None:
    """Allow plain HTTP if an endpoint uses it and may.

    Requests to GCS and Azure contain bearer tokens, unlike those to S3, which are signed with a secret that is never sent.

    Raises:
        ConfigError: The endpoint is on another machine, and nothing allows plain HTTP.
    """
    parts = urlsplit(endpoint or "")
    if parts.scheme != "http":
        return
    if not _is_loopback(parts.hostname or "") and os.environ.get(ALLOW_HTTP, "") not in {"1", "true"}:
        raise ConfigError(
            f"store {url!r}: the endpoint {endpoint} is plain HTTP on another machine",
            f"use an https:// endpoint, or set {ALLOW_HTTP}=1 if the network may see the data and the credentials",
        )
    client["allow_http"] = True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
