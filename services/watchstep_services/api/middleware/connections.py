"""uvicorn's HTTP protocols with deadlines, and with limits of connections, heads and unread responses.

uvicorn only limits the time of an idle connection between two requests. A connection with an incomplete head or body stays open until
its client closes it, a head may have any size, and a response waits without limit for a client that does not read it. The classes here
extend uvicorn's own protocols, for h11 and httptools, and track the part of a request that is expected:

    connected, or the first byte of a request  -- header_seconds -->  head complete  -- body_seconds -->  request complete

A request that is not complete in time gets the status 408, and the connection is closed. During a response, for example an event
stream, no deadline applies, except to the head of another request that has already started. Received bytes do not extend a deadline.

Bytes outside of bodies (request lines, headers, frames of chunks, trailers) are counted from the last complete head on. Beyond
`MOST_HEAD` or `MOST_LINES` the request gets the status 431. httptools' parser cannot pause between two requests. It therefore receives
data in pieces, and a connection with more than `MOST_QUEUED` requests behind an unanswered one is closed. h11 reads no further request
before it has answered the first.

A client that reads nothing of a response for write_seconds is disconnected (`transports`).

A process limits its connections to less than its open files, so that evaluation, stores and the database always have some. At the limit,
a new connection replaces one of the address with the most connections, preferably an idle one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from watchstep_services.api.middleware.rate_limits import network_of
from watchstep_services.api.middleware.request_limits import MOST_HEADERS
from watchstep_services.api.middleware.transports import WatchedTransport
from watchstep_services.core.process import most_connections
from watchstep_services.core.settings import Settings
from watchstep_services.core.telemetry import metrics

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # part of the extra `production`
    HttpToolsProtocol = None  # type: ignore[assignment,misc]

MOST_HEAD = 64 * 1024
"""Bytes. Higher than the limits of `request_limits`, because their error responses contain a reason."""

MOST_LINES = 2 * MOST_HEADERS
MOST_QUEUED = 16

_PIECE = 8 * 1024
_FRAME_BYTES = 8
"""Bytes of chunk frames that are allowed per byte of a body, in addition to `MOST_HEAD`. A chunk of one byte has five."""

_RETRY_SECONDS = 5
_FLUSH_SECONDS = 1.0
_PROXIES = "FORWARDED_ALLOW_IPS"
_HEAD = "head"

_log = logging.getLogger(__name__)


class Replaceable(Protocol):
    """A connection that `Connections` may close."""

    def is_idle(self) -> bool:
        """Return whether no request is in progress."""

    def evict(self) -> None:
        """Close the connection at once, and call `Connections.exit`."""


class Connections:
    """The connections of one process, by address. Use it in the event loop of the process only.

    Attributes:
        settings: the deadlines, and the limit per address.
        most: maximum number of connections.
        open: connections by address; a /64 network of IPv6 counts as one address.
    """

    def __init__(self, settings: Settings, most: int | None = None) -> None:
        self.settings = settings
        self.most = most_connections() if most is None else most
        self.open: defaultdict[str, dict[Replaceable, None]] = defaultdict(dict)
        # Proxies must be configured; uvicorn's default, loopback, does not mean that there is one.
        self._proxies = proxies()

    def enter(self, address: str, connection: Replaceable) -> bool:
        """Add a connection. Returns False, without adding it, if its address or the process has too many."""
        most = self.settings.address_connections
        limited = most and not self._proxies & {address, "*"}
        network = network_of(address)
        if limited and len(self.open.get(network, ())) >= most:
            metrics.CONNECTIONS_REFUSED.labels("address").inc()
            return False
        if sum(map(len, self.open.values())) >= self.most and not self._make_room(network):
            metrics.CONNECTIONS_REFUSED.labels("process").inc()
            return False
        self.open[network][connection] = None
        return True

    def _make_room(self, network: str) -> bool:
        """Close a connection of the network with the most connections; False if the given network has as many."""
        largest = max(self.open, key=lambda name: len(self.open[name]))
        connections = self.open[largest]
        if len(connections) <= len(self.open.get(network, ())) + 1:
            return False
        evicted = next((entry for entry in connections if entry.is_idle()), next(iter(connections)))
        metrics.CONNECTIONS_REFUSED.labels("process").inc()
        evicted.evict()
        return True

    def exit(self, address: str, connection: Replaceable) -> None:
        """Remove a connection that `enter` added."""
        network = network_of(address)
        connections = self.open[network]
        connections.pop(connection, None)
        if not connections:
            del self.open[network]


def proxies() -> set[str]:
    """Return the addresses with a trusted ``X-Forwarded-For``; none by default."""
    return {name.strip() for name in os.environ.get(_PROXIES, "").split(",") if name.strip()}


def server_options() -> dict[str, Any]:
    """Return arguments of `uvicorn.Config` for all servers of the API."""
    return {"http": LimitedHttp, "ws": "none", "log_config": None, "proxy_headers": bool(proxies())}


if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = object


class _Limited(_Base):
    """Deadlines and limits for uvicorn's protocols, which have the same attributes."""

    _limits: Connections | None = None
    _address = ""
    _deadline: asyncio.TimerHandle | None = None
    _expected: Any = None
    _heads = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count or refuse the connection, and start the deadline of the first request."""
        limits = _connections_of(self.app)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        seconds = limits.settings.write_seconds
        refused = metrics.CONNECTIONS_REFUSED.labels("write").inc
        super().connection_made(WatchedTransport(transport, self.loop, seconds, refused))
        if not limits.enter(address, self):
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS)
            return
        self._limits, self._address = limits, address
        self._set_expected((_HEAD, self._heads))

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the count."""
        self._set_expected(None)
        if self._limits is not None:
            self._limits.exit(self._address, self)
            self._limits = None
        if isinstance(self.transport, WatchedTransport):
            self.transport.end()
        super().connection_lost(exc)

    def is_idle(self) -> bool:
        """Return whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def evict(self) -> None:
        """Close the connection to make room for another."""
        if self._limits is not None:
            self._limits.exit(self._address, self)
            self._limits = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and set the deadline of the next expected part."""
        for first in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            piece = data[first : first + _PIECE]
            super().data_received(piece)
            if self._is_too_large(len(piece)):
                self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "size")
                return
        self._set_expected(self._expected_part())

    def _is_too_large(self, size: int) -> bool:  # noqa: ARG002 - h11 limits its own buffer
        """Return whether a piece of this size exceeds the limits."""
        return False

    def _expected_part(self) -> Any:
        """Return the expected part: a head, the body of a request, or None."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return _HEAD, self._heads
        return cycle if cycle.more_body else None

    def _set_expected(self, part: Any) -> None:
        """Set the expected part and start its deadline. An active deadline of the same part continues."""
        if part is not None and part == self._expected and self._deadline is not None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._expected, self._deadline = part, None
        if part is None or self._limits is None or self.transport.is_closing():
            return
        settings = self._limits.settings
        seconds = settings.header_seconds if isinstance(part, tuple) else settings.body_seconds
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        part, self._deadline = self._expected, None
        if self.flow.read_paused:  # the application has not read the data yet, so that the client is not late
            self._expected = None
            self._set_expected(part)
            return
        if part == self._expected_part():
            self._end(HTTPStatus.REQUEST_TIMEOUT, _HEAD if isinstance(part, tuple) else "body")

    def _end(self, status: HTTPStatus, what: str) -> None:
        """Refuse the current request and close the connection; drop the pending response to an earlier request."""
        metrics.CONNECTIONS_REFUSED.labels(what).inc()
        cycle: Any = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if is_answered or (cycle.more_body and not cycle.response_started and not self._queued()):
            self._refuse(status)
        else:
            self.transport.abort()

    def _queued(self) -> int:
        """Return the number of requests behind an unanswered one."""
        return 0

    def _refuse(self, status: HTTPStatus) -> None:
        """Respond with an error and close. Data that the client does not read within a second is dropped."""
        retry = f"retry-after: {_RETRY_SECONDS}\r\n" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{retry}cache-control: no-store\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()
        self.loop.call_later(_FLUSH_SECONDS, self.transport.abort)


class LimitedH11(_Limited, H11Protocol):
    """Protocol for installations without httptools."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = h11.Connection(h11.SERVER, MOST_HEAD)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse, or that is too large."""
        if len(self.conn.trailing_data[0]) > MOST_HEAD:
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "size")
        else:
            super().send_400_response(msg)


if HttpToolsProtocol is None:
    LimitedHttp: type[asyncio.Protocol] = LimitedH11
else:

    class LimitedHttpTools(_Limited, HttpToolsProtocol):  # type: ignore[misc]
        """Protocol for installations with httptools. Its parser calls the methods ``on_…``."""

        _in_head = False
        _lines = 0
        _frames = 0
        _body = 0

        _answering: Any = None

        def connection_lost(self, exc: Exception | None) -> None:
            """Remove the connection and its queued requests, and cancel a response that uvicorn no longer tracks."""
            self.pipeline.clear()
            cycle, self._answering = self._answering, None
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._answering = cycle
            super()._start_asgi_task(cycle, app)

        def on_message_begin(self) -> None:
            """Handle the start of a request."""
            self._in_head = True
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Store a header. Trailers are dropped, because the application would treat them as headers."""
            self._lines += 1
            if self._in_head:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Handle the end of a head."""
            self._in_head = False
            self._heads += 1
            super().on_headers_complete()
            self._reset_counts()

        def on_body(self, body: bytes) -> None:
            """Store a part of a body."""
            self._body += len(body)
            super().on_body(body)

        def on_response_complete(self) -> None:
            """Handle the end of a response, after which the next queued request starts."""
            super().on_response_complete()
            if not self._in_head:
                self._reset_counts()

        def _reset_counts(self) -> None:
            """Reset the counts, unless requests are queued."""
            if not self.pipeline:
                self._lines = self._frames = 0

        def _is_too_large(self, size: int) -> bool:
            self._frames = max(0, self._frames + size - (1 + _FRAME_BYTES) * self._body)
            self._body = 0
            return self._frames > MOST_HEAD or self._lines > MOST_LINES or self._queued() > MOST_QUEUED

        def _queued(self) -> int:
            return len(self.pipeline)

        def _expected_part(self) -> Any:
            return (_HEAD, self._heads) if self._in_head else super()._expected_part()

    LimitedHttp = LimitedHttpTools
"""The protocol that uvicorn would select, with deadlines and limits; the argument ``http`` of uvicorn."""


def _connections_of(app: Any) -> Connections:
    """Return the connections of the application that uvicorn has wrapped."""
    while not hasattr(app, "state"):
        app = app.app
    connections = app.state.connections
    assert isinstance(connections, Connections)
    return connections
