"""Requests of the SDK to the service: registrations, announcements, and credentials. Recording never needs them.

After a failure the client pauses. ``traceparent`` (W3C) makes the service's trace continue the program's; it is written without a library.
With ``WATCHSTEP_CREDENTIALS=service`` the service lends credentials that write one attempt and nothing else, and renews them as long as the
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
from collections.abc import Callable, Mapping
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
from watchstep.store.cloud import S3Access
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme

HEADER = "traceparent"


def current_span() -> str:
    """The ``traceparent`` of this thread's current span; empty without one, or where OpenTelemetry was not loaded."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    except Exception:  # noqa: BLE001 - whatever somebody put in its place, recording goes on
        return ""


def new_trace() -> str:
    """The ``traceparent`` of a trace that begins here. Takes nothing from the program's random generators."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_PAUSED = frozenset((401, 403, 429, 502, 503, 504))
_random = random.SystemRandom()  # the program's own generator stays as it is


def _jitter() -> float:
    return _random.uniform(0.0, 0.25)


class ServicePause:
    """The pause after a failure: what the service asks for, or else longer from failure to failure, 30 s at the most.

    Each is up to a quarter longer, at random: recorders that failed together must not return together.

    Args:
        clock: seconds, growing.
        jitter: the share that is added.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._until = float("-inf")
        self._next = _FIRST_SECONDS

    @property
    def goes_on(self) -> bool:
        """Whether the service should not be asked yet."""
        return self._clock() < self._until

    @property
    def left(self) -> float:
        """Seconds until it may be asked."""
        return max(0.0, self._until - self._clock())

    def failed(self, error: ServiceError) -> None:
        """The service refused, did not answer, or with something else.

        Of refusals, 401, 403 and 429 are about the caller, and 502 to 504 about a service that is starting; any other makes a
        pause only if the answer names one.
        """
        after = error.after_seconds if isinstance(error, ServiceRefusedError) else None
        if isinstance(error, ServiceRefusedError) and after is None and error.status not in _PAUSED:
            return
        pause = self._next if after is None else max(self._next, min(LONGEST_RETRY_AFTER, after))
        self._until = self._clock() + pause * (1.0 + self._jitter())
        self._next = min(_LONGEST_SECONDS, 2 * self._next)

    def answered(self) -> None:
        """The service took what it was told."""
        self._until, self._next = float("-inf"), _FIRST_SECONDS

    def hurry(self) -> None:
        """The process is about to end: the service is asked once more at once."""
        self._until = float("-inf")


_TIMEOUT_SECONDS = 5.0
_LENDING_SECONDS = 30.0  # the service asks AWS meanwhile
_LONGEST_PAUSE = 30.0
_MAX_ANSWER = 4 * 1024 * 1024
_MAX_ANSWER_MEMORY = 64 * 1024 * 1024
_MEND = "check the URL, and that 'watchstep serve' runs there; recording goes on without it"


class ServiceClient:
    """A few requests for one project, each sent once: whoever asks also waits between two tries, and may be told to end meanwhile.

    Each takes five seconds at most, its answer's last byte included (30 for credentials); never called on the training thread.
    """

    def __init__(
        self,
        address: ServiceAddress | None,
        project: str,
        locate: Callable[[], ServiceAddress | None] | None = None,
    ) -> None:
        """Nothing is asked yet.

        Args:
            address: of the service; None where it is not known yet.
            project: whose runs.
            locate: says where the service answers now, when it does not at its address.
        """
        # Announcements come from a thread of their own, on which the program has no span.
        self._parent = current_span()
        self.pause_seconds = 0.0
        """What the last answer asked for between two announcements; the service lags where it is not 0."""
        self._locate = locate
        self._runs = f"/v1/projects/{segment(project)}/runs"
        self._transport: Transport | None = None
        if address is not None:
            self.move(address)

    @property
    def is_located(self) -> bool:
        """Whether there is an address to ask."""
        return self._transport is not None

    def move(self, address: ServiceAddress) -> bool:
        """Ask at another address from now on; whether it is another."""
        if self._transport is not None and self._transport.address == address:
            return False
        self._transport = Transport(address, _TIMEOUT_SECONDS, bounds_request=True, tries=1)
        return True

    def register(self, registration: Mapping[str, Any]) -> dict[str, Any]:
        """Make a run known, with its rules and job.

        Args:
            registration: the body of ``POST /v1/projects/{project}/runs``.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        return self._post(self._runs, registration)

    def credentials(self, run: str, attempt: str) -> dict[str, Any]:
        """Credentials that write one attempt.

        Returns:
            The answer of ``POST …/attempts/{attempt}/credentials``.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        named = f"{segment(run)}/attempts/{segment(attempt)}"
        return self._post(f"{self._runs}/{named}/credentials", {}, seconds=_LENDING_SECONDS)

    def announce(
        self, run: str, key: SegmentKey, health: Mapping[str, Any], *, urgent: bool = False
    ) -> ControlDocument:
        """Say that a segment lies on the store.

        What follows from it belongs to one trace: that of this thread's current span, or of the one in which the client
        was made, or else a new one.

        Returns:
            The control document of the run.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        body = {
            "attempt": key.writer.attempt,
            "node": key.writer.node,
            "writer": key.writer.writer,
            "seq": key.seq,
            "first": key.first,
            "last": key.last,
            "health": health,
            "urgent": urgent,
        }
        trace = current_span() or self._parent or new_trace()
        answer = self._post(f"{self._runs}/{segment(run)}/announcements", body, {HEADER: trace})
        try:
            control = ControlDocument.from_data(answer["control"])
        except (KeyError, FormatError) as error:
            raise ServiceError(f"{self._name}: no control document in its answer", _MEND) from error
        self.pause_seconds = _pause(answer.get("pause_seconds"))
        return control

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
        if self._transport is None:
            raise UnreachableError("service: none is known yet", _MEND)
        content, _ = self._transport.fetch(
            "POST", path, None, body, headers, seconds=seconds, repeatable=True, most=_MAX_ANSWER
        )
        try:
            data = parse_json(content, _MAX_ANSWER_MEMORY)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._name}: its answer is no JSON ({error})", _MEND) from error
        if not isinstance(data, dict):
            raise ServiceError(f"{self._name}: an answer of another form", _MEND)
        return data

    def _has_moved(self) -> bool:
        """Whether the service answers elsewhere, or with another token, since it was started again."""
        address = self._locate() if self._locate is not None else None
        return address is not None and self.move(address)


def _pause(asked: Any) -> float:
    """Seconds, where an answer holds a number of them; no answer can hold a recorder up for long."""
    return float(min(asked, _LONGEST_PAUSE)) if type(asked) in (int, float) and asked > 0 else 0.0


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
        self._settings: dict[str, Any] | None = _of(self.answer)

    def __call__(self) -> Mapping[str, Any]:
        """Those that were asked for just now, or new ones; the old, as long as they count, where there are none.

        Raises:
            ServiceError: the service refuses, or does not answer, and the old ones have expired.
        """
        with self._lock:
            settings, self._settings = self._settings, None
            if settings is not None:
                return settings  # the first, just asked for
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
    on_fault: Callable[[str, Exception], None] | None = None,
    *,
    identity: StoreIdentity | None = None,
) -> Store:
    """The store that a recorder writes to; with lent credentials where the environment asks for them.

    Where the service lends none, the program's own are used, if it has any, and that is told.

    Args:
        url: of the store.
        names: project, run and attempt.
        service: where to ask; the environment's where it is left out.
        on_fault: hears what went wrong, once.
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
        if on_fault is not None:
            on_fault("credentials", error)
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
