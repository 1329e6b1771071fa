"""Deliveries: one HTTP request or SMTP session to a checked address, with a time limit and without redirects.

The limit applies whatever the other side does, for example if it reads or sends byte by byte.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timezone
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import certifi
import httpcore

from watchstep.errors import ConfigError
from watchstep_services.channels.notification import Notification
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import Address, EgressPolicy
from watchstep_services.core.telemetry import tracing

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class DeliveryContext:
    """The context of one delivery.

    Attributes:
        egress_policy: addresses that it may be sent to.
        seconds: time limit.
        now_ns: time by the database's clock.
        secrets: the receiver's decrypted secrets, by field. They are never shown.
    """

    egress_policy: EgressPolicy
    seconds: float
    now_ns: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def secret(self, name: str) -> str:
        """A secret of the receiver.

        Raises:
            ConfigError: it is not set.
        """
        try:
            return self.secrets[name]
        except KeyError:
            raise ConfigError(f"secret {name!r}: not set", "give it to the receiver") from None


@dataclass(frozen=True)
class MessagePicture:
    """The picture of one alert of a notification.

    Attributes:
        alert: fingerprint of the alert.
        text: one line for readers who do not see it.
        page: the alert's page; empty without a public URL.
        url: address from which a chat program fetches the picture without a token, for a limited time; empty for none.
        png: the picture; empty if the message only links to it.
    """

    alert: str
    text: str
    page: str = ""
    url: str = field(default="", repr=False)
    png: bytes = field(default=b"", repr=False)

    @property
    def secure_url(self) -> str:
        """``url`` if it is HTTPS; empty otherwise. PagerDuty and Teams show no other pictures."""
        return self.url if self.url.startswith("https://") else ""


@dataclass(frozen=True)
class Message:
    """A rendered notification.

    Attributes:
        notification: the notification.
        title: one line.
        text: a few lines.
        has_custom_text: whether the receiver has templates of its own.
        event: the notification as a CloudEvent, JSON-ready.
        picture: the picture of its first alert; None for none.
    """

    notification: Notification
    title: str
    text: str
    has_custom_text: bool
    event: dict[str, Any]
    picture: MessagePicture | None = None


class Cutoff:
    """Shuts down connections when the time is over, which wakes a thread that waits for them. Use it as a context manager."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self.passed = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            while self._connections:
                self._connections.pop().close()

    @property
    def left(self) -> float:
        """Seconds left, at least a millisecond, because 0 has another meaning for sockets."""
        return max(0.001, self._end - time.monotonic())

    def watch(self, connection: socket.socket) -> None:
        """Shut down this connection, too, when the time is over."""
        # The descriptor is duplicated, because TLS detaches the original from its socket.
        with self._lock:
            self._connections.append(connection.dup())
            if self.passed:
                self._cut_all()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            self._cut_all()

    def _cut_all(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # already closed by the other side
                connection.shutdown(socket.SHUT_RDWR)


def connect(policy: EgressPolicy, host: str, port: int, cutoff: Cutoff) -> socket.socket:
    """Connect to the first of the host's addresses that answers.

    Raises:
        AddressRefusedError: one of its addresses is not allowed.
        OSError: no address answers.
    """
    problem: OSError | None = None
    for address in policy.addresses(host, port, cutoff.left):
        try:
            connection = socket.create_connection((address, port), timeout=cutoff.left)
        except OSError as error:
            problem = error
            continue
        connection.settimeout(cutoff.left + 1)  # longer than the cutoff, which reports the timeout
        cutoff.watch(connection)
        return connection
    assert problem is not None  # a host has at least one address
    raise problem


class CheckedBackend(httpcore.NetworkBackend):
    """A network backend of httpcore that resolves and checks the host itself; TLS and ``Host`` still use the host's name."""

    def __init__(self, policy: EgressPolicy, cutoff: Cutoff) -> None:
        self._policy = policy
        self._cutoff = cutoff
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the cutoff limits the whole request
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first of the host's addresses that answers.

        Raises:
            AddressRefusedError: one of its addresses is not allowed.
            httpcore.ConnectError: no address answers.
        """
        problem: Exception | None = None
        try:
            addresses = self._policy.addresses(host, port, self._cutoff.left)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        for address in addresses:
            try:
                stream = self._inner.connect_tcp(
                    address, port, self._cutoff.left, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
                continue
            self._cutoff.watch(stream.get_extra_info("socket"))
            return stream
        assert problem is not None  # a host has at least one address
        raise problem


def tls_context() -> ssl.SSLContext:
    """A TLS context with the system's and certifi's authorities; if ``SSL_CERT_FILE`` is set, only with those in it."""
    return _tls_context(os.environ.get("SSL_CERT_FILE", ""))


@lru_cache(maxsize=8)
def _tls_context(own: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=own or None)
    if not own:
        context.load_verify_locations(certifi.where())
    return context


LONGEST_PAUSE = 3600.0
"""Longest pause, in seconds, that a receiver may request by ``Retry-After``."""

USER_AGENT = "watchstep"
_TRY_AGAIN = frozenset({408, 425, 429})
_NANOSECONDS = 1_000_000_000


class PostError(Exception):
    """The request got no response; it may be sent again."""


@dataclass(frozen=True)
class PostResponse:
    """The response of a server.

    Attributes:
        status: HTTP status.
        retry_after: value of the header; empty if absent.
    """

    status: int
    retry_after: str


def try_post(
    delivery: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes
) -> AttemptResult:
    """Send one request. The result contains only the status, because users who name an address must not read its content.

    Args:
        delivery: the delivery context.
        address: address of the receiver.
        headers: headers other than ``Host``, ``User-Agent`` and the length.
        body: body of the request.

    Raises:
        AddressRefusedError: the address is not allowed.
    """
    try:
        response = post(delivery, address, headers, body)
    except PostError as error:
        return AttemptResult("error", f"{address.host}: {error}")
    # Only the host is named, because paths are secrets of some receivers.
    detail = f"{address.host}: answered {response.status}"
    if 200 <= response.status < 300:
        return AttemptResult("done", detail)
    if response.status >= 500 or response.status in _TRY_AGAIN:
        return AttemptResult("error", detail, after_ns=_after(response.retry_after, delivery.now_ns))
    if 300 <= response.status < 400:
        return AttemptResult(
            "failed", f"{detail}; redirects are not followed: configure the address of the redirect"
        )
    return AttemptResult("failed", f"{detail}; the receiver refused the event, so it is not sent again")


def post(
    delivery: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes
) -> PostResponse:
    """Send one request; name resolution, request and response together are limited to ``delivery.seconds``.

    Raises:
        AddressRefusedError: the address is not allowed.
        PostError: there was no response.
    """
    with tracing.span("POST", request=_request_span(address)) as span:
        response = _post(delivery, address, headers, body, span)
        span.describe({"http.response.status_code": response.status})
        if response.status >= 400:
            span.fail(str(response.status))
        return response


def _request_span(address: Address) -> tracing.RequestSpan:
    attributes: dict[str, str | int] = {
        "http.request.method": "POST",
        "server.address": address.host,
        "server.port": address.port,
        "url.scheme": address.scheme,
        "url.full": f"{address.scheme}://{address.authority}/REDACTED",  # paths are secrets of some receivers
    }
    return tracing.RequestSpan("client", attributes)


def _post(
    delivery: DeliveryContext,
    address: Address,
    headers: Mapping[str, str],
    body: bytes,
    span: tracing.Spanned,
) -> PostResponse:
    seconds = delivery.seconds
    url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
    sent = [("Host", address.authority), ("User-Agent", USER_AGENT), ("Content-Length", str(len(body)))]
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    with (
        Cutoff(seconds) as cutoff,
        httpcore.ConnectionPool(
            ssl_context=tls_context(),
            max_connections=1,
            network_backend=CheckedBackend(delivery.egress_policy, cutoff),
        ) as pool,
    ):
        try:
            with pool.stream(
                "POST", url, headers=[*sent, *headers.items()], content=body, extensions={"timeout": timeout}
            ) as response:
                return _read(response)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            timed_out = cutoff.passed or isinstance(error, httpcore.TimeoutException)
            span.fail("timeout" if timed_out else f"httpcore.{type(error).__name__}")
            if timed_out:
                raise PostError(f"no answer within {seconds:g} s") from error
            if isinstance(error, httpcore.ProtocolError):  # its message repeats received data
                raise PostError("the response is not HTTP") from error
            raise PostError(f"{type(error).__name__}: {error}") from error


def _read(response: httpcore.Response) -> PostResponse:
    """Status and headers; the body is not read."""
    after = next((value for name, value in response.headers if name.lower() == b"retry-after"), b"")
    return PostResponse(response.status, after.decode("latin-1").strip())


def _after(written: str, now_ns: int) -> int:
    """When the receiver requests the next try, in nanoseconds since the epoch; 0 if it does not."""
    if not written:
        return 0
    if written.isascii() and written.isdigit():
        pause = min(float(written[:9]), LONGEST_PAUSE)
        return now_ns + round(pause * _NANOSECONDS)
    try:
        moment = email.utils.parsedate_to_datetime(written)
    except (TypeError, ValueError):
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return min(round(moment.timestamp()) * _NANOSECONDS, now_ns + round(LONGEST_PAUSE * _NANOSECONDS))
