"""How a message is sent: one HTTP request or SMTP session to a checked address, bounded in time, without redirects.

The bound holds whatever the other side does: sending byte by byte can be slow, too.
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

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class DeliveryContext:
    """One try's way out.

    Attributes:
        reach: where it may be sent to.
        seconds: how long a receiver may take.
        now_ns: by the database's clock.
        secrets: the receiver's, opened, by field. They are shown nowhere.
    """

    reach: EgressPolicy
    seconds: float
    now_ns: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def secret(self, name: str) -> str:
        """A secret of the receiver.

        Raises:
            ConfigError: it is not there.
        """
        try:
            return self.secrets[name]
        except KeyError:
            raise ConfigError(f"secret {name!r}: not set", "give it to the receiver") from None


@dataclass(frozen=True)
class Message:
    """A notification, put into words.

    Attributes:
        notification: what is told.
        title: one line.
        text: a few lines.
        worded: whether title and text are the receiver's own, and not the default ones.
        event: the notification as a CloudEvent, JSON-ready.
    """

    notification: Notification
    title: str
    text: str
    worded: bool
    event: dict[str, Any]


class Cutoff:
    """Cuts a connection when the time is up, which wakes whoever waits on it. Use it as a context manager."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
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
            while self._held:
                self._held.pop().close()

    @property
    def left(self) -> float:
        """Seconds that are left; a little more than none where none are, as sockets take 0 for something else."""
        return max(0.001, self._end - time.monotonic())

    def watch(self, connection: socket.socket) -> None:
        """Cut this connection, too."""
        # A copy of the descriptor: TLS takes the original one away from its socket.
        with self._lock:
            self._held.append(connection.dup())
            if self.passed:
                self._cut_all()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            self._cut_all()

    def _cut_all(self) -> None:
        for connection in self._held:
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)


def connect(reach: EgressPolicy, host: str, port: int, cutoff: Cutoff) -> socket.socket:
    """A connection to one of the host's addresses, the first that answers.

    Raises:
        AddressRefusedError: one of its addresses is not allowed.
        OSError: none answers.
    """
    problem: OSError | None = None
    for address in reach.addresses(host, port, cutoff.left):
        try:
            made = socket.create_connection((address, port), timeout=cutoff.left)
        except OSError as error:
            problem = error
            continue
        made.settimeout(cutoff.left + 1)  # the cutoff comes first, and says so
        cutoff.watch(made)
        return made
    assert problem is not None  # a host has at least one address
    raise problem


class CheckedBackend(httpcore.NetworkBackend):
    """httpcore's way to the network: looks up and checks by itself, so that TLS and ``Host`` still say the name."""

    def __init__(self, reach: EgressPolicy, cutoff: Cutoff) -> None:
        self._reach = reach
        self._cutoff = cutoff
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the cutoff's is for all of it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """A stream to one of the host's addresses.

        Raises:
            AddressRefusedError: one of them is not allowed.
            httpcore.ConnectError: none answers.
        """
        problem: Exception | None = None
        try:
            addresses = self._reach.addresses(host, port, self._cutoff.left)
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
    """Trust in the system's authorities and in those of certifi; in those of ``SSL_CERT_FILE`` alone where it is set."""
    return _tls_context(os.environ.get("SSL_CERT_FILE", ""))


@lru_cache(maxsize=8)
def _tls_context(own: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=own or None)
    if not own:
        context.load_verify_locations(certifi.where())
    return context


LONGEST_PAUSE = 3600.0
"""Seconds that a receiver may put off the next try by ``Retry-After``."""

USER_AGENT = "watchstep"
_TRY_AGAIN = frozenset({408, 425, 429})
_NANOSECONDS = 1_000_000_000


class PostError(Exception):
    """The request got no answer; it may be sent again."""


@dataclass(frozen=True)
class PostResponse:
    """What a server said.

    Attributes:
        status: of HTTP.
        retry_after: as it was sent; empty where it was not.
    """

    status: int
    retry_after: str


def try_post(
    delivery: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes
) -> AttemptResult:
    """Send one request, and say what came of it: by the status alone, for whoever names an address may not read what lies there.

    Args:
        delivery: the way out.
        address: of the receiver.
        headers: beside ``Host``, ``User-Agent`` and the length.
        body: of the request.

    Raises:
        AddressRefusedError: the address is not allowed.
    """
    try:
        answer = post(delivery, address, headers, body)
    except PostError as error:
        return AttemptResult("error", f"{address.host}: {error}")
    # The host alone: paths are secrets of some receivers.
    said = f"{address.host}: answered {answer.status}"
    if 200 <= answer.status < 300:
        return AttemptResult("done", said)
    if answer.status >= 500 or answer.status in _TRY_AGAIN:
        return AttemptResult("error", said, after_ns=_after(answer.retry_after, delivery.now_ns))
    if 300 <= answer.status < 400:
        return AttemptResult(
            "failed", f"{said}; redirects are not followed: name the address that it leads to"
        )
    return AttemptResult("failed", f"{said}; the receiver refuses the event, so it is not sent again")


def post(
    delivery: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes
) -> PostResponse:
    """Send one request; all of it, from looking the host up to the answer, is bounded by ``outside.seconds``.

    Raises:
        AddressRefusedError: the address is not allowed.
        PostError: there was no answer.
    """
    seconds = delivery.seconds
    url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
    sent = [("Host", address.authority), ("User-Agent", USER_AGENT), ("Content-Length", str(len(body)))]
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    with (
        Cutoff(seconds) as cutoff,
        httpcore.ConnectionPool(
            ssl_context=tls_context(),
            max_connections=1,
            network_backend=CheckedBackend(delivery.reach, cutoff),
        ) as pool,
    ):
        try:
            with pool.stream(
                "POST", url, headers=[*sent, *headers.items()], content=body, extensions={"timeout": timeout}
            ) as said:
                return _read(said)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            if cutoff.passed or isinstance(error, httpcore.TimeoutException):
                raise PostError(f"no answer within {seconds:g} s") from error
            if isinstance(error, httpcore.ProtocolError):  # its message repeats what was received
                raise PostError("its answer is not HTTP") from error
            raise PostError(f"{type(error).__name__}: {error}") from error


def _read(said: httpcore.Response) -> PostResponse:
    """Status and headers; the body is left unread."""
    after = next((value for name, value in said.headers if name.lower() == b"retry-after"), b"")
    return PostResponse(said.status, after.decode("latin-1").strip())


def _after(written: str, now_ns: int) -> int:
    """When the receiver wants the next try, in nanoseconds since the epoch; 0 where it does not say."""
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
