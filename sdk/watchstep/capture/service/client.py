"""Requests of the SDK to the service: registrations, announcements, and credentials. Recording works without them.

After a failure the client pauses. ``traceparent`` (W3C) makes the service's trace continue the program's; it is written without a library.
With ``WATCHSTEP_CREDENTIALS=service`` the service lends credentials that write one attempt and nothing else, and renews them while the
attempt runs. They are requested on the writer's thread and on obstore's, never on the training thread.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from watchstep.errors import ConfigError, FormatError, ServiceError, StoreError
from watchstep.format.control import ControlDocument
from watchstep.format.documents import parse_json
from watchstep.format.layout import SegmentKey
from watchstep.platform.transport import (
    LONGEST_RETRY_AFTER,
    ServiceAddress,
    ServiceRefusedError,
    Transport,
    UnreachableError,
    segment,
)
from watchstep.store import known_stores
from watchstep.store.cloud import S3Access
from watchstep.store.errors import PROVIDERS
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme

HEADER = "traceparent"


def current_span() -> str:
    """Return the ``traceparent`` of this thread's current span; empty without one, or if OpenTelemetry is not loaded."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    except Exception:  # noqa: BLE001 - a replaced module must not affect recording
        return ""


def new_trace() -> str:
    """Return the ``traceparent`` of a new trace. Does not use the program's random generators."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def store_in(answer: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the URL and the id of a run's store from the answer to its registration; None if it names no store."""
    url, identity = answer.get("store"), answer.get("store_id")
    if not (isinstance(url, str) and isinstance(identity, str) and known_stores.ID.fullmatch(identity)):
        return None
    return (url, identity) if len(url) <= _LONGEST_URL else None


_LONGEST_URL = 4096
"""Links in a path are followed part by part, which takes minutes for a million parts."""
_FIRST_SECONDS = 1.0
_MAX_SECONDS = 30.0
_PAUSED = frozenset((401, 403, 429, 502, 503, 504))
_random = random.SystemRandom()  # does not change the state of the program's generator


def _jitter() -> float:
    return _random.uniform(0.0, 0.25)


class ServicePause:
    """The pause after a failure: as the service requests, or else increasing with each failure, at most 30 s.

    Each pause is randomly up to a quarter longer, so that recorders that failed together do not return together.

    Args:
        clock: monotonic time in seconds.
        jitter: returns the added share.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._until = float("-inf")
        self._next = _FIRST_SECONDS

    @property
    def is_active(self) -> bool:
        """Whether the service must not be contacted yet."""
        return self._clock() < self._until

    @property
    def remaining(self) -> float:
        """Seconds until the service may be contacted."""
        return max(0.0, self._until - self._clock())

    def failed(self, error: ServiceError, *, repeats: bool = True) -> None:
        """Record a failed request.

        Args:
            error: the error.
            repeats: whether the same request will be sent again. If not, only an answer with ``Retry-After``, or one about the caller or
                a service that is starting (401, 403, 429, 502 to 504), causes a pause.
        """
        after = error.after_seconds if isinstance(error, ServiceRefusedError) else None
        is_about_request = isinstance(error, ServiceRefusedError) and error.status not in _PAUSED
        if not repeats and is_about_request and after is None:
            return
        pause = self._next if after is None else max(self._next, min(LONGEST_RETRY_AFTER, after))
        self._until = self._clock() + pause * (1.0 + self._jitter())
        self._next = min(_MAX_SECONDS, 2 * self._next)

    def answered(self) -> None:
        """Record a successful request."""
        self._until, self._next = float("-inf"), _FIRST_SECONDS

    def hurry(self) -> None:
        """Allow one more request at once, because the process is about to end."""
        self._until = float("-inf")


_TIMEOUT_SECONDS = 5.0
_LENDING_SECONDS = 30.0  # the service sends requests to AWS meanwhile
_MAX_PAUSE = 30.0
MOST_SEGMENTS = 256
"""Segments in one announcement."""

_MAX_ANSWER = 4 * 1024 * 1024
_MAX_ANSWER_MEMORY = 64 * 1024 * 1024
_PAGES = ("https://", "http://")
_MAX_PAGE_URL = 2000
_HINT = "check the URL, and that 'watchstep serve' runs there; recording continues without it"


class ServiceClient:
    """Requests for one project. Each is sent once: the caller waits between retries, and may be interrupted meanwhile.

    Each takes at most five seconds, including its answer's last byte (30 for credentials). Never used on the training thread.
    """

    def __init__(
        self,
        address: ServiceAddress | None,
        project: str,
        locate: Callable[[], ServiceAddress | None] | None = None,
    ) -> None:
        """Create the client without sending requests.

        Args:
            address: address of the service; None if unknown.
            project: the project.
            locate: returns the service's current address, if it does not answer at the known one.
        """
        # Announcements are sent by a separate thread, on which the program has no span.
        self._parent = current_span()
        self.pause_seconds = 0.0
        """Pause between announcements that the last answer requested; not 0 if the service lags."""
        self.on_store: Callable[[str, str], object] | None = None
        """Called with the URL and the id of the run's store, as the answer to each registration states them."""
        self.page_url = ""
        """URL of the run's web page, as the last answer to a registration stated it; empty if unknown."""
        self.is_registered = False
        """Whether the service has accepted a registration."""
        self.is_evaluated = False
        """Whether the service has evaluated rows of the run, as the last answer to an announcement stated."""
        self._locate = locate
        self._runs = f"/v1/projects/{segment(project)}/runs"
        self._transport: Transport | None = None
        if address is not None:
            self.move(address)

    @property
    def is_located(self) -> bool:
        """Whether an address is known."""
        return self._transport is not None

    def move(self, address: ServiceAddress) -> bool:
        """Use another address from now on. Returns whether it differs."""
        if self._transport is not None and self._transport.address == address:
            return False
        self._transport = Transport(address, _TIMEOUT_SECONDS, bounds_request=True, tries=1)
        return True

    def register(self, registration: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """Register a run, with its rules and job.

        Args:
            registration: the body of ``POST /v1/projects/{project}/runs``.
            seconds: timeout, by default that of every request.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        answer = self._post(self._runs, registration, seconds=seconds)
        self.is_registered = True
        page_url = answer.get("page_url")
        if isinstance(page_url, str) and page_url.startswith(_PAGES) and len(page_url) <= _MAX_PAGE_URL:
            self.page_url = page_url
        self.receive_store(answer)
        return answer

    def receive_store(self, answer: Mapping[str, Any]) -> None:
        """Pass the store in the answer to a registration to `on_store`."""
        named = store_in(answer)
        if named is not None and self.on_store is not None:
            self.on_store(*named)

    def credentials(self, run: str, attempt: str, store_url: str) -> dict[str, Any]:
        """Request credentials that write one attempt to a store.

        Returns:
            The answer of ``POST …/attempts/{attempt}/credentials``.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        path = f"{segment(run)}/attempts/{segment(attempt)}"
        return self._post(f"{self._runs}/{path}/credentials", {"store": store_url}, seconds=_LENDING_SECONDS)

    def announce(
        self, run: str, keys: Sequence[SegmentKey], health: Mapping[str, Any], *, urgent: bool = False
    ) -> ControlDocument:
        """Announce that segments are on the store.

        The service's work for them belongs to one trace: that of this thread's current span, or of the one in which the client
        was created, or else a new one.

        Args:
            run: the run.
            keys: 1 to `MOST_SEGMENTS` segments of one attempt, in the order in which they were written.
            health: health of the recorder.
            urgent: whether the service should evaluate the run before others.

        Returns:
            The control document of the run.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        body = {
            "attempt": keys[0].writer.attempt,
            "segments": [
                {
                    "node": key.writer.node,
                    "writer": key.writer.writer,
                    "seq": key.seq,
                    "first": key.first,
                    "last": key.last,
                }
                for key in keys
            ],
            "health": health,
            "urgent": urgent,
        }
        trace = current_span() or self._parent or new_trace()
        answer = self._post(f"{self._runs}/{segment(run)}/announcements", body, {HEADER: trace})
        try:
            control = ControlDocument.from_data(answer["control"])
        except (KeyError, FormatError) as error:
            raise ServiceError(f"{self._name}: its answer has no control document", _HINT) from error
        self.pause_seconds = _pause(answer.get("pause_seconds"))
        self.is_evaluated = answer.get("evaluated") is True
        return control

    def alert_changes(
        self, run: str, attempt: str, after: int, *, seconds: float | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Request how the alerts of an attempt began to fire and resolved.

        Args:
            run: the run.
            attempt: the attempt.
            after: position after the last change that was returned; 0 for all.
            seconds: timeout, by default that of every request.

        Returns:
            The ``alerts`` of ``GET …/alert-changes``, and the position after them.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        query = {"attempt": attempt, "after": after}
        seconds = _TIMEOUT_SECONDS if seconds is None else seconds
        changes = self._sent("GET", f"{self._runs}/{segment(run)}/alert-changes", query, None, None, seconds)
        alerts, position = changes.get("alerts"), changes.get("after")
        if (
            not isinstance(alerts, list)
            or not all(isinstance(alert, dict) for alert in alerts)
            or type(position) is not int
        ):
            raise ServiceError(f"{self._name}: its answer has no alerts", _HINT)
        return alerts, position

    @property
    def _name(self) -> str:
        return f"service {self._transport.address.url}" if self._transport else "service"

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        seconds = _TIMEOUT_SECONDS if seconds is None else seconds
        try:
            return self._posted(path, body, headers, seconds)
        except (ServiceRefusedError, UnreachableError) as error:
            if (isinstance(error, ServiceRefusedError) and not error.is_denial) or not self._has_moved():
                raise
        return self._posted(path, body, headers, seconds)

    def _posted(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None, seconds: float
    ) -> dict[str, Any]:
        return self._sent("POST", path, None, body, headers, seconds)

    def _sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        seconds: float,
    ) -> dict[str, Any]:
        if self._transport is None:
            raise UnreachableError("the service's address is not known yet", _HINT)
        content, _ = self._transport.fetch(
            method, path, query, body, headers, seconds=seconds, repeatable=True, max_bytes=_MAX_ANSWER
        )
        try:
            data = parse_json(content, _MAX_ANSWER_MEMORY)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._name}: its answer is not valid JSON ({error})", _HINT) from error
        if not isinstance(data, dict):
            raise ServiceError(f"{self._name}: its answer is not a JSON object", _HINT)
        return data

    def _has_moved(self) -> bool:
        """Whether the service has another address or token since it was restarted."""
        address = self._locate() if self._locate is not None else None
        return address is not None and self.move(address)


def _pause(requested: Any) -> float:
    """Return the requested pause in seconds, 0 if it is invalid. The maximum keeps a service from blocking a recorder for long."""
    return float(min(requested, _MAX_PAUSE)) if type(requested) in (int, float) and requested > 0 else 0.0


CREDENTIALS = "WATCHSTEP_CREDENTIALS"
SERVICE = "service"
_RENEWAL_PAUSE = 30.0
"""Pause after the service refused to renew credentials that are still valid."""


class LentCredentials:
    """Credential provider for obstore, which calls it when credentials are about to expire. Thread-safe.

    Attributes:
        answer: the service's last answer.
    """

    def __init__(self, service: ServiceClient, run: str, attempt: str, store_url: str) -> None:
        """Request the first credentials.

        Raises:
            ServiceError: the service refuses, or does not answer.
        """
        self._request: Callable[[], dict[str, Any]] = functools.partial(
            service.credentials, run, attempt, store_url
        )
        self._lock = threading.Lock()
        self._next_request_at = 0.0
        self.answer = self._request()
        self._settings: dict[str, Any] | None = _of(self.answer)

    def __call__(self) -> Mapping[str, Any]:
        """Return new credentials; the previous ones if there are none and they are still valid.

        Raises:
            ServiceError: the service refuses, or does not answer, and the previous ones have expired.
        """
        with self._lock:
            settings, self._settings = self._settings, None
            if settings is not None:
                return settings  # the first ones, just requested
            previous = _of(self.answer)
            if time.monotonic() < self._next_request_at and previous["expires_at"] > datetime.now(
                timezone.utc
            ):
                return previous
            try:
                self.answer = self._request()
            except ServiceError:
                self._next_request_at = time.monotonic() + _RENEWAL_PAUSE
                if previous["expires_at"] <= datetime.now(timezone.utc):
                    raise
                return previous
            return _of(self.answer)


def open_recorded(
    url: str,
    names: tuple[str, str, str],
    service: ServiceClient | None = None,
    on_fault: Callable[[str, Exception], None] | None = None,
    *,
    identity: StoreIdentity | None = None,
) -> Store:
    """Open the store that a recorder writes to, with lent credentials if the environment requests them.

    If the service lends none, the program's own are used, if it has any, and a fault is reported.

    Args:
        url: URL of the store.
        names: project, run and attempt.
        service: client of the service; by default the environment's service.
        on_fault: called once with an error of lending.
        identity: identity of a local store; remembered from the first time that it is opened.

    Raises:
        ConfigError: the URL or a variable is invalid.
        StoreError: there are no credentials, or a local folder cannot be created.
    """
    if not lent():
        return Store.open(url, create=True, identity=identity)
    try:
        return _open_lent(url, names, service)
    except ServiceError as error:
        if PROVIDERS.get(checked_scheme(url)) == "s3" and not _has_own():
            raise StoreError(
                f"store {url}: no credentials: {error.what}",
                f"{error.hint}; or give the program its own credentials, and unset {CREDENTIALS}",
            ) from error
        if on_fault is not None:
            on_fault("credentials", error)
        return Store.open(url, create=True, identity=identity)


def lent() -> bool:
    """Whether the service is requested to lend credentials.

    Raises:
        ConfigError: the variable is invalid.
    """
    value = os.environ.get(CREDENTIALS, "")
    if value not in {"", SERVICE}:
        raise ConfigError(f"invalid {CREDENTIALS}={value!r}", f"set {SERVICE!r}, or unset it")
    return value == SERVICE


def _open_lent(url: str, names: tuple[str, str, str], service: ServiceClient | None) -> Store:
    project, run, attempt = names
    if PROVIDERS.get(checked_scheme(url)) != "s3":
        raise ServiceError(
            f"store {url} is not an S3 bucket: credentials are lent for S3 only", f"unset {CREDENTIALS}"
        )
    if service is None:
        address = ServiceAddress.from_environment()
        if address is None:
            raise ServiceError(f"{CREDENTIALS}={SERVICE}: no service is configured", "set WATCHSTEP_SERVICE")
        service = ServiceClient(address, project)
    credentials = LentCredentials(service, run, attempt, url)
    registered = str(credentials.answer.get("store", url)).rstrip("/")
    if registered != url.rstrip("/"):
        raise ServiceError(
            f"the store of run {project}/{run} is {registered}, not {url}", "set WATCHSTEP_STORE to it"
        )
    region, endpoint = (str(credentials.answer.get(name, "")) for name in ("region", "endpoint"))
    return Store.open(url, access=S3Access(credentials, region, endpoint, hides_missing=True))


def _of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the service's answer to obstore's format.

    Raises:
        ServiceError: the answer is invalid.
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
            "the service's answer has no credentials", "check that the service has the same version"
        ) from error


def _has_own() -> bool:
    """Whether the program has its own credentials."""
    try:
        import boto3
    except ImportError:
        return bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    return boto3.Session().get_credentials() is not None
