"""Credentials that the service lends to a recorder: they write one attempt and nothing else, and are renewed as long as it goes on.

Asked for by ``WATCHSTEP_CREDENTIALS=service``. On the writer's thread and on obstore's, never on the training thread.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from watchstep.capture.service.client import ServiceClient
from watchstep.errors import ConfigError, ServiceError, StoreError
from watchstep.platform.transport import ServiceAddress
from watchstep.store.cloud import S3Access
from watchstep.store.identity import StoreIdentity
from watchstep.store.store import Store, checked_scheme

CREDENTIALS = "WATCHSTEP_CREDENTIALS"
SERVICE = "service"
_PAUSE = 30.0
"""After the service refused to renew, while those that are held still count."""


class LentCredentials:
    """What obstore asks when those that it has are about to expire. Thread-safe.

    Attributes:
        answer: the service's, as it came last.
    """

    def __init__(self, service: ServiceClient, run: str, attempt: str) -> None:
        """Ask for the first.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        self._ask: Callable[[], dict[str, Any]] = functools.partial(service.credentials, run, attempt)
        self._lock = threading.Lock()
        self._again_at = 0.0
        self.answer = self._ask()
        self._held: dict[str, Any] | None = _of(self.answer)

    def __call__(self) -> Mapping[str, Any]:
        """Those that were asked for just now, or new ones; the old, as long as they count, where there are none.

        Raises:
            ServiceError: the service refuses, or does not answer, and the old ones have expired.
        """
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                return held  # the first, just asked for
            old = _of(self.answer)
            if time.monotonic() < self._again_at and old["expires_at"] > datetime.now(timezone.utc):
                return old
            try:
                self.answer = self._ask()
            except ServiceError:
                self._again_at = time.monotonic() + _PAUSE
                if old["expires_at"] <= datetime.now(timezone.utc):
                    raise
                return old
            return _of(self.answer)


def open_recorded(
    url: str,
    names: tuple[str, str, str],
    service: ServiceClient | None = None,
    told: Callable[[str, Exception], None] | None = None,
    *,
    identity: StoreIdentity | None = None,
) -> Store:
    """The store that a recorder writes to; with lent credentials where the environment asks for them.

    Where the service lends none, the program's own are used, if it has any, and that is told.

    Args:
        url: of the store.
        names: project, run and attempt.
        service: where to ask; the environment's where it is left out.
        told: hears what went wrong, once.
        identity: of the store, where it is a folder; remembered from the first time that it is opened.

    Raises:
        ConfigError: the URL or a variable cannot be used.
        StoreError: there are no credentials, or a local folder cannot be made.
    """
    if not lent():
        return Store.open(url, create=True, identity=identity)
    try:
        return _open_lent(url, names, service)
    except ServiceError as error:
        if checked_scheme(url) in {"s3", "s3a"} and not _has_own():
            raise StoreError(
                f"store {url}: no credentials: {error.what}",
                f"{error.hint}; or give the program its own, and unset {CREDENTIALS}",
            ) from error
        if told is not None:
            told("credentials", error)
        return Store.open(url, create=True, identity=identity)


def lent() -> bool:
    """Whether the service is to lend credentials.

    Raises:
        ConfigError: the variable has another value.
    """
    value = os.environ.get(CREDENTIALS, "")
    if value not in {"", SERVICE}:
        raise ConfigError(f"{CREDENTIALS}={value!r}", f"set {SERVICE!r}, or unset it")
    return value == SERVICE


def _open_lent(url: str, names: tuple[str, str, str], service: ServiceClient | None) -> Store:
    project, run, attempt = names
    if checked_scheme(url) not in {"s3", "s3a"}:
        raise ServiceError(f"store {url}: no bucket on S3; none are lent for it", f"unset {CREDENTIALS}")
    if service is None:
        address = ServiceAddress.from_environment()
        if address is None:
            raise ServiceError(f"{CREDENTIALS}={SERVICE}: no service is named", "set WATCHSTEP_SERVICE")
        service = ServiceClient(address, project)
    credentials = LentCredentials(service, run, attempt)
    registered = str(credentials.answer.get("store", url)).rstrip("/")
    if registered != url.rstrip("/"):
        raise ServiceError(
            f"project {project!r} lies at {registered}, not at {url}", "set WATCHSTEP_STORE to it"
        )
    region, endpoint = (str(credentials.answer.get(name, "")) for name in ("region", "endpoint"))
    return Store.open(url, access=S3Access(credentials, region, endpoint, hides_missing=True))


def _of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The service's answer as obstore takes it.

    Raises:
        ServiceError: it is another.
    """
    try:
        expires = datetime.fromisoformat(str(answer["expires_at"]).replace("Z", "+00:00"))
        return {
            "access_key_id": str(answer["access_key_id"]),
            "secret_access_key": str(answer["secret_access_key"]),
            "token": str(answer["session_token"]),
            "expires_at": expires.astimezone(timezone.utc),
        }
    except (KeyError, ValueError) as error:
        raise ServiceError(
            "the service's answer holds no credentials", "see that it is of this version"
        ) from error


def _has_own() -> bool:
    """Whether the program has credentials of its own."""
    try:
        import boto3
    except ImportError:
        return bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    return boto3.Session().get_credentials() is not None
