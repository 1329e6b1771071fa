"""HTTP requests to a service: pooled connections, retries with jitter, ``Retry-After``. The client and the recorder use it.

A request is sent again only if that cannot do its work twice:

==================================  ==================================================================
no connection was made              always: nothing was sent
the connection broke, 502           GET, PUT and DELETE; POST only with an ``Idempotency-Key``, or if it is repeatable
429, 503, 504                       the same; after the time that the answer names, if it names one
no answer in time, any other        never
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
_random = random.SystemRandom()  # the program's own generator stays as it is


@dataclass(frozen=True)
class ServiceAddress:
    """Where the service answers, and the token to show it."""

    url: str
    token: str = ""

    @classmethod
    def from_environment(cls) -> ServiceAddress | None:
        """The service that ``WATCHSTEP_SERVICE`` names, if it names one.

        Raises:
            ConfigError: it is no http or https URL.
        """
        url = os.environ.get(SERVICE, "")
        return cls.checked(url, os.environ.get(TOKEN, "")) if url else None

    @classmethod
    def checked(cls, url: str, token: str) -> ServiceAddress:
        """An address.

        Raises:
            ConfigError: it is no http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"service {url!r}: no http or https URL", "use the URL that 'watchstep serve' prints"
            )
        return cls(url.rstrip("/"), token)


class UnreachableError(ServiceError):
    """There was no answer.

    Attributes:
        timed_out: whether the service took too long after it had received the request.
    """

    def __init__(self, what: str, hint: str, *, timed_out: bool = False) -> None:
        super().__init__(what, hint)
        self.timed_out = timed_out


class ServiceRefusedError(ServiceError):
    """The service refused.

    Attributes:
        status: of its answer.
        type: what kind of problem; ``urn:watchstep:problem:…``, empty where the answer is not of a Watchstep service.
        after_seconds: when the service may be asked again, if it said so.
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
        """Whether the token is refused."""
        return self.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}

    @property
    def is_final(self) -> bool:
        """Whether the same request will be refused again: a Watchstep service has read it, and it is wrong."""
        return bool(self.type) and 400 <= self.status < 500 and self.status not in _RETRIED_LATER


_RETRIED_LATER = frozenset((401, 403, 408, 429))


class MissingError(ServiceRefusedError, NotFoundError):
    """There is no such thing."""


class Transport:
    """Sends requests to one service. Thread-safe; a forked child has connections of its own.

    Args:
        address: of the service.
        timeout: seconds that it may be silent.
        bounds_request: whether the seconds bound a request as a whole: its connection, headers and body.
        tries: how often a request is sent at most; 1 never waits between tries.
        wait: waits for seconds.
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
        """One request; its answer, read from JSON, None where it is empty.

        Raises:
            MissingError: there is no such thing.
            RefusedError: it is refused.
            ServiceError: the service does not answer.
        """
        content, _ = self.fetch(method, path, query, body, headers)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self.address.url}: its answer is no JSON ({error})", _HINT) from error

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
        most: int = _MAX_ANSWER,
    ) -> tuple[bytes, Mapping[str, str]]:
        """As `call`; the answer's bytes and its headers, named in lower case.

        Args:
            method: GET, POST, PUT or DELETE.
            path: below the service's URL.
            query: names and values; those that are None are left out.
            body: sent as JSON.
            headers: added to the usual ones.
            seconds: instead of the transport's.
            repeatable: a POST that may be done twice, and needs no key for it.
            most: bytes of the answer.
        """
        sent = dict(headers or {})
        if method == "POST" and not repeatable:
            sent.setdefault(_KEY, str(uuid.uuid4()))  # one for all tries
        for attempt in range(1, self._tries + 1):
            try:
                with self.open(method, path, query, body, sent, seconds=seconds, repeatable=True) as answer:
                    content = _read(answer, most)
                    if len(content) > most:
                        raise ServiceError(f"{path}: over {most} bytes", "ask for less")
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
        """One request without another try; its answer, to be read within the block.

        Args:
            method: as `fetch`.
            path: as `fetch`.
            query: as `fetch`.
            body: as `fetch`.
            headers: as `fetch`.
            seconds: as `fetch`.
            repeatable: whether it may come twice, where the service closes a connection that it had kept; all but POST if left out.

        Raises:
            MissingError, RefusedError, ServiceError: as `call`.
        """
        from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError
        from urllib3.exceptions import TimeoutError as AnyTimeoutError

        asked = {name: value for name, value in (query or {}).items() if value is not None and value != ()}
        url = f"{self.address.url}{path}" + (f"?{urlencode(asked, doseq=True)}" if asked else "")
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
                f"service {self.address.url}: no answer ({_described(error)})",
                _HINT,
                timed_out=isinstance(error, AnyTimeoutError) and not unsent,
            ) from error
        except (OSError, ValueError) as error:
            raise UnreachableError(
                f"service {self.address.url}: no answer ({_described(error)})", _HINT
            ) from error
        finally:
            if answer is not None:
                answer.close()  # the connection of one that was read to its end is kept


class _Connections:
    """The connections of this process to one address.

    Without a lock, so that a child which is forked at any moment can use it.

    Args:
        bounds_request: as `Transport`.
    """

    def __init__(self, *, bounds_request: bool) -> None:
        import urllib3  # noqa: F401 - here and not while something is sent: that may be when the process ends

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
        """Send a request; again, where the service had closed the connection meanwhile and the request may come twice.

        Raises:
            urllib3.exceptions.HTTPError: there is no answer.
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
        # Those of a parent stay in the dictionary: their sockets are its own.
        return self._managers.get(key) or self._managers.setdefault(
            key, _manager_by(key[1], bounds_request=self._bounds_request)
        )


class _IdleConnections:
    """The queue of a connection pool, last in first out. It has no lock that a fork could leave locked."""

    def __init__(self, maxsize: int) -> None:
        self._items: deque[Any] = deque()
        self._most = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002 - a queue's
        """Keep a connection."""
        if len(self._items) >= self._most:
            raise Full
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002 - as above
        """Take the connection that was used last."""
        try:
            return self._items.pop()
        except IndexError:
            raise Empty from None

    def qsize(self) -> int:
        """How many there are."""
        return len(self._items)


class _BoundedResponse(http.client.HTTPResponse):
    """A response that ends by the socket's timeout as a whole: by itself, a socket's timeout bounds each read of a few bytes."""

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
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read what has come.

        Raises:
            TimeoutError: nothing came until the deadline.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(seconds)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Give the socket back."""
        self._raw.close()
        super().close()


def _manager_by(proxy: str, *, bounds_request: bool) -> PoolManager:
    import urllib3
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Http(HTTPConnection):
        response_class = _BoundedResponse if bounds_request else http.client.HTTPResponse

    class Https(HTTPSConnection):
        response_class = Http.response_class

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
    """The proxy that the environment names for a URL; empty for none."""
    parts, named = urlsplit(url), urllib.request.getproxies()
    proxy = named.get(parts.scheme) or named.get("all") or ""
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _read(answer: BaseHTTPResponse, most: int) -> bytes:
    """An answer's content, and one byte more than the most where it is longer."""
    return answer.read(most + 1)


def pause_seconds(tries: int, after: float | None = None) -> float:
    """How long to wait after a try that failed: what the service asked for, or longer from try to try; never two alike.

    Programs that met the same failure at the same time would otherwise come back at the same time.

    Args:
        tries: how many have failed.
        after: the seconds that the service named, if it did.
    """
    if after is not None:
        return min(LONGEST_RETRY_AFTER, after) * _random.uniform(1.0, 1.1)
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (tries - 1)) * _random.uniform(0.5, 1.0)


def retry_after(value: str, now: datetime | None = None) -> float | None:
    """The seconds of a ``Retry-After`` header, which holds them or a date; None where it holds neither."""
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
    """One part of a path."""
    return quote(name, safe="")


def _described(error: BaseException) -> str:
    """The reason, without the library's own words before it."""
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
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    after = retry_after(answer.headers.get("Retry-After", ""))
    return (MissingError if status == 404 else ServiceRefusedError)(status, kind, what, hint, after)
