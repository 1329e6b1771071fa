"""HTTP requests to a service: pooled connections, retries with jitter, ``Retry-After``. Used by the client and the recorder.

A request is retried only if a retry cannot repeat its effect:

==================================  ==================================================================
no connection was made              always, because nothing was sent
the connection broke, 502           GET, PUT and DELETE; POST only with an ``Idempotency-Key``, or if it is repeatable
429, 503, 504                       the same, after the time in the response, if any
no response in time, any other      never
==================================  ==================================================================
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import random
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from queue import Empty, Full
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

from watchstep.errors import ConfigError, NotFoundError, ServiceError

if TYPE_CHECKING:
    import socket
    import ssl

    from _typeshed import WriteableBuffer
    from urllib3 import BaseHTTPResponse, PoolManager

SERVICE = "WATCHSTEP_SERVICE"
TOKEN = "WATCHSTEP_TOKEN"  # noqa: S105 - the name of a variable
JSON = "application/json"
TRIES = 4
LONGEST_RETRY_AFTER = 300.0

_MAX_ANSWER = 256 * 1024 * 1024
_MAX_PROBLEM = 1024 * 1024
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_MOST_IDLE = 8
_PASSING = frozenset((429, 502, 503, 504))
_KEY = "Idempotency-Key"
_HINT = "check the URL, and that 'watchstep serve' runs there"
_random = random.SystemRandom()  # the program's own generator is not changed


@dataclass(frozen=True)
class ServiceAddress:
    """URL of the service, and the token for it."""

    url: str
    token: str = ""

    @classmethod
    def from_environment(cls) -> ServiceAddress | None:
        """Return the service in ``WATCHSTEP_SERVICE``, or None if it is not set.

        Raises:
            ConfigError: It is not an http or https URL.
        """
        url = os.environ.get(SERVICE, "")
        return cls.checked(url, os.environ.get(TOKEN, "")) if url else None

    @classmethod
    def checked(cls, url: str, token: str) -> ServiceAddress:
        """Return a validated address.

        Raises:
            ConfigError: It is not an http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"service {url!r} is not an http or https URL", "use the URL that 'watchstep serve' prints"
            )
        return cls(url.rstrip("/"), token)


class UnreachableError(ServiceError):
    """There was no response.

    Attributes:
        timed_out: Whether the response took too long after the service had received the request.
    """

    def __init__(self, what: str, hint: str, *, timed_out: bool = False) -> None:
        super().__init__(what, hint)
        self.timed_out = timed_out


class ServiceRefusedError(ServiceError):
    """The service refused a request.

    Attributes:
        status: Status of the response.
        type: Type of the problem, ``urn:watchstep:problem:…``; empty if the response is not from a Watchstep service.
        after_seconds: Time in seconds until a retry, if the service specified it.
    """

    def __init__(
        self, status: int, kind: str, what: str, hint: str, after_seconds: float | None = None
    ) -> None:
        super().__init__(what, hint)
        self.status = status
        self.type = kind
        self.after_seconds = after_seconds

    @property
    def is_denial(self) -> bool:
        """Return whether the token was refused."""
        return self.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}

    @property
    def is_final(self) -> bool:
        """Return whether the same request will be refused again, because a Watchstep service found it invalid."""
        return bool(self.type) and 400 <= self.status < 500 and self.status not in _RETRIED_LATER


_PROBLEM = "urn:watchstep:problem:"
_RETRIED_LATER = frozenset((401, 403, 408, 429))


class MissingError(ServiceRefusedError, NotFoundError):
    """The requested object does not exist."""


class Transport:
    """Sends requests to one service. Thread-safe; a forked child has its own connections.

    Args:
        address: Address of the service.
        timeout: Timeout of the service in seconds.
        bounds_request: Whether the timeout applies to the whole request: its connection, headers and body.
        tries: Maximum number of tries; 1 never waits between tries.
        wait: Function that waits for a number of seconds.
    """

    def __init__(
        self,
        address: ServiceAddress,
        timeout: float,
        *,
        bounds_request: bool = False,
        tries: int = TRIES,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._tries = tries
        self._wait = wait
        self._connections = _Connections(bounds_request=bounds_request)

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request, and return its response decoded from JSON; None if it is empty.

        Raises:
            MissingError: The requested object does not exist.
            RefusedError: The service refused the request.
            ServiceError: The service does not respond.
        """
        content, _ = self.fetch(method, path, query, body, headers)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            raise ServiceError(
                f"{self.address.url} sent a response that is not JSON ({error})", _HINT
            ) from error

    def fetch(  # noqa: PLR0913 - the parts of a request, and its bounds
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
        repeatable: bool = False,
        max_bytes: int = _MAX_ANSWER,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Send a request like `call`, and return the response's bytes and its headers with lower-case names.

        Args:
            method: GET, POST, PUT or DELETE.
            path: Path below the service's URL.
            query: Names and values. Values of None are omitted.
            body: Content, sent as JSON.
            headers: Additional headers.
            seconds: Timeout instead of the transport's.
            repeatable: Whether a POST may be repeated without an idempotency key.
            max_bytes: Maximum size of the response in bytes.
        """
        sent = dict(headers or {})
        if method == "POST" and not repeatable:
            sent.setdefault(_KEY, str(uuid.uuid4()))  # one for all tries
        for attempt in range(1, self._tries + 1):
            try:
                with self.open(method, path, query, body, sent, seconds=seconds, repeatable=True) as answer:
                    content = _read(answer, max_bytes)
                    if len(content) > max_bytes:
                        raise ServiceError(f"{path}: over {max_bytes} bytes", "ask for less")
                    return content, {name.lower(): value for name, value in answer.headers.items()}
            except ServiceRefusedError as error:
                if error.status not in _PASSING or attempt == self._tries:
                    raise
                pause = pause_seconds(attempt, error.after_seconds)
            except UnreachableError as error:
                if error.timed_out or attempt == self._tries:
                    raise
                pause = pause_seconds(attempt)
            self._wait(pause)
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def open(  # noqa: PLR0913 - as above
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
        repeatable: bool | None = None,
    ) -> Iterator[BaseHTTPResponse]:
        """Send a request without retries, and yield its response, which must be read within the block.

        Args:
            method: As for `fetch`.
            path: As for `fetch`.
            query: As for `fetch`.
            body: As for `fetch`.
            headers: As for `fetch`.
            seconds: As for `fetch`.
            repeatable: Whether the request may be repeated if the service has closed a kept connection; by default all but POST.

        Raises:
            MissingError, RefusedError, ServiceError: As for `call`.
        """
        from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError
        from urllib3.exceptions import TimeoutError as AnyTimeoutError

        parameters = {
            name: value for name, value in (query or {}).items() if value is not None and value != ()
        }
        url = f"{self.address.url}{path}" + (f"?{urlencode(parameters, doseq=True)}" if parameters else "")
        sent = {"Accept": JSON, "Authorization": f"Bearer {self.address.token}", **(headers or {})}
        data = None if body is None else json.dumps(body, default=str).encode()
        if data is not None:
            sent["Content-Type"] = JSON
        silent = self._timeout if seconds is None else seconds
        answer: BaseHTTPResponse | None = None
        try:
            again = method != "POST" if repeatable is None else repeatable
            answer = self._connections.send(method, url, data, sent, silent, repeatable=again)
            if answer.status >= 300:
                raise _refusal(url, answer)
            yield answer
        except HTTPError as error:
            unsent = isinstance(error, NewConnectionError | ConnectTimeoutError)
            raise UnreachableError(
                f"service {self.address.url} does not respond ({_described(error)})",
                _HINT,
                timed_out=isinstance(error, AnyTimeoutError) and not unsent,
            ) from error
        except (OSError, ValueError) as error:
            raise UnreachableError(
                f"service {self.address.url} does not respond ({_described(error)})", _HINT
            ) from error
        finally:
            if answer is not None:
                answer.close()  # the connection of a completely read response is kept


class _Connections:
    """Connections of this process to one address.

    There is no lock, so that a child that is forked at any moment can use it.

    Args:
        bounds_request: As for `Transport`.
    """

    def __init__(self, *, bounds_request: bool) -> None:
        import urllib3  # noqa: F401 - here and not during a request, which may be at the end of the process

        self._bounds_request = bounds_request
        self._managers: dict[tuple[int, str], PoolManager] = {}

    def send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        silent: float,
        *,
        repeatable: bool,
    ) -> BaseHTTPResponse:
        """Send a request. Repeat it if the service had closed the connection and the request is repeatable.

        Raises:
            urllib3.exceptions.HTTPError: There is no response.
        """
        from urllib3 import Timeout
        from urllib3.exceptions import ProtocolError

        manager, deadline = self._manager(url), time.monotonic() + silent
        for last in (not repeatable, True):
            left = max(0.001, deadline - time.monotonic()) if self._bounds_request else silent
            timeout = Timeout(
                connect=min(left, _CONNECT_SECONDS), read=left, total=left if self._bounds_request else None
            )
            try:
                return manager.request(
                    method, url, body=body, headers=headers, timeout=timeout, retries=False, redirect=False,
                    preload_content=False, decode_content=False,
                )  # fmt: skip
            except ProtocolError as error:
                if last or not isinstance(error.args[-1], ConnectionError):
                    raise
        raise AssertionError("the last try returns or raises")

    def _manager(self, url: str) -> PoolManager:
        key = (os.getpid(), _proxy_of(url))
        # Connections of a parent process stay in the dictionary, because it owns their sockets.
        return self._managers.get(key) or self._managers.setdefault(
            key, _manager_by(key[1], bounds_request=self._bounds_request)
        )


class _IdleConnections:
    """Queue of a connection pool, last in first out, without a lock that a fork could leave locked."""

    def __init__(self, maxsize: int) -> None:
        self._items: deque[Any] = deque()
        self._most = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002 - a queue's
        """Keep a connection."""
        if len(self._items) >= self._most:
            raise Full
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002 - as above
        """Return the most recently used connection."""
        try:
            return self._items.pop()
        except IndexError:
            raise Empty from None

    def qsize(self) -> int:
        """Return the number of connections."""
        return len(self._items)


class _BoundedResponse(http.client.HTTPResponse):
    """A response with the socket's timeout for the whole response. A socket's own timeout applies to each read of a few bytes."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        seconds = sock.gettimeout()
        if seconds is not None:
            buffered = self.fp
            assert isinstance(buffered, io.BufferedReader)
            self.fp = io.BufferedReader(_DeadlineReader(sock, buffered.detach(), time.monotonic() + seconds))


class _DeadlineReader(io.RawIOBase):
    """Reads a socket until a deadline."""

    def __init__(self, connection: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        super().__init__()
        self._connection = connection
        self._raw = raw
        self._deadline = deadline

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read the available bytes.

        Raises:
            TimeoutError: No bytes arrived before the deadline.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(seconds)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Release the socket."""
        self._raw.close()
        super().close()


_TLS_SECONDS = 600.0
"""How long the certificates of authorities stay in memory. To read them costs some 20 ms, far more than a request."""


class _TlsContexts:
    """The TLS context of new connections. urllib3 would create one for each connection, also if it fails."""

    def __init__(self) -> None:
        self._context: ssl.SSLContext | None = None
        self._until = 0.0

    def current(self) -> ssl.SSLContext:
        """Return a context with the system's certificates, as urllib3 configures it."""
        from urllib3.util.ssl_ import create_urllib3_context

        context = self._context
        if context is None or time.monotonic() >= self._until:
            context = create_urllib3_context()
            context.load_default_certs()
            self._context, self._until = context, time.monotonic() + _TLS_SECONDS
        return context


def _manager_by(proxy: str, *, bounds_request: bool) -> PoolManager:
    import urllib3
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Http(HTTPConnection):
        response_class = _BoundedResponse if bounds_request else http.client.HTTPResponse

    contexts = _TlsContexts()

    class Https(HTTPSConnection):
        response_class = Http.response_class

        def connect(self) -> None:
            self.ssl_context = contexts.current()
            super().connect()

    class HttpPool(urllib3.HTTPConnectionPool):
        QueueCls = _IdleConnections  # type: ignore[assignment]
        ConnectionCls = Http

    class HttpsPool(urllib3.HTTPSConnectionPool):
        QueueCls = _IdleConnections  # type: ignore[assignment]
        ConnectionCls = Https

    if proxy:
        parts = urlsplit(proxy)
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        headers = urllib3.make_headers(proxy_basic_auth=user)
        manager: PoolManager = urllib3.ProxyManager(plain, proxy_headers=headers, maxsize=_MOST_IDLE)
    else:
        manager = urllib3.PoolManager(maxsize=_MOST_IDLE)
    manager.pool_classes_by_scheme = {"http": HttpPool, "https": HttpsPool}
    return manager


def _proxy_of(url: str) -> str:
    """Return the proxy for a URL in the environment; empty without one."""
    parts, named = urlsplit(url), urllib.request.getproxies()
    proxy = named.get(parts.scheme) or named.get("all") or ""
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _read(answer: BaseHTTPResponse, max_bytes: int) -> bytes:
    """An answer's content, and one byte more than the most where it is longer."""
    return answer.read(max_bytes + 1)


def pause_seconds(tries: int, after: float | None = None) -> float:
    """Return the seconds to wait after a failed try: the service's time, or an exponential backoff, with jitter.

    Without jitter, programs with a simultaneous failure would retry simultaneously.

    Args:
        tries: Number of failed tries.
        after: The time in seconds that the service specified, if any.
    """
    if after is not None:
        return min(LONGEST_RETRY_AFTER, after) * _random.uniform(1.0, 1.1)
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (tries - 1)) * _random.uniform(0.5, 1.0)


def retry_after(value: str, now: datetime | None = None) -> float | None:
    """Return the seconds of a ``Retry-After`` header with seconds or a date; None for any other value."""
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    seconds = (at - (now or datetime.now(timezone.utc))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def segment(name: str) -> str:
    """Quote a name as one segment of a path."""
    return quote(name, safe="")


def _described(error: BaseException) -> str:
    """Return the reason without the library's prefix."""
    text = str(error)
    return text.partition("Failed to establish a new connection: ")[2] or text or type(error).__name__


def _refusal(url: str, answer: BaseHTTPResponse) -> ServiceRefusedError:
    status = answer.status
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    kind, what = "", f"{url}: answered {status} {phrase}".rstrip()
    hint = "see that the URL is that of a Watchstep service"
    try:
        problem = json.loads(_read(answer, _MAX_PROBLEM))
        kind, what, hint = str(problem.get("type", "")), str(problem["detail"]), str(problem["hint"])
        if not kind.startswith(_PROBLEM):
            kind = ""  # another service: what it refuses may be accepted once the right one answers
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    after = retry_after(answer.headers.get("Retry-After", ""))
    return (MissingError if status == 404 else ServiceRefusedError)(status, kind, what, hint, after)
