"""uvicorn's HTTP protocol with deadlines, and with limits of connections, of heads and of what clients do not read.

uvicorn bounds the time of an idle connection between two requests, and nothing else: a connection that sends half a head or half a
body stays open until its client ends it, a head may be of any size, and an answer waits for ever for a client that does not read it.
The protocol here is uvicorn's own, h11's or httptools', and watches which part of a request it waits for:

    connected, or the first byte of a request  -- header_seconds -->  head complete  -- body_seconds -->  request complete

A request that is not complete in time is answered by 408, and the connection closed. While a request is answered, as by an event
stream, no deadline runs, except for the head of a further request that has begun already. No byte of a request lengthens a deadline.

Bytes that are no body (request lines, headers, frames of chunks, trailers) are counted since the last complete head; beyond `MOST_HEAD`
or `MOST_LINES` the request is answered by 431. httptools' parser cannot be paused between two requests, so it is fed pieces, and a
connection with more than `MOST_QUEUED` requests that wait for the answer to an earlier one is closed. h11 reads no further request before
the first is answered.

A client that takes nothing of an answer for write_seconds loses its connection (`transports`).

A process keeps fewer connections open than it may open files, so that evaluation, stores and the database always have some. When it is full, a new
connection takes the place of one of the address that has the most, an idle one if there is.
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
except ImportError:  # it is of the extra `production`
    HttpToolsProtocol = None  # type: ignore[assignment,misc]

MOST_HEAD = 64 * 1024
"""Bytes; more than `request_limits` allows of a whole head, whose answers say more."""

MOST_LINES = 2 * MOST_HEADERS
MOST_QUEUED = 16

_PIECE = 8 * 1024
_FRAME_BYTES = 8
"""So many bytes of chunks' frames are allowed for each byte of a body, besides `MOST_HEAD`: a chunk of one byte has five."""

_RETRY_SECONDS = 5
_FLUSH_SECONDS = 1.0
_PROXIES = "FORWARDED_ALLOW_IPS"
_HEAD = "head"

_log = logging.getLogger(__name__)


class Replaceable(Protocol):
    """A connection, as `Connections` needs it."""

    def is_idle(self) -> bool:
        """Whether it waits between two requests."""

    def give_way(self) -> None:
        """Close it at once, and call `Connections.exit`."""


class Connections:
    """The connections of one process, by address. To be used in its event loop.

    Attributes:
        settings: the deadlines and the limit of an address.
        most: connections of all addresses.
        open: connections by address; an IPv6 network of 64 bits counts as one.
    """

    def __init__(self, settings: Settings, most: int | None = None) -> None:
        self.settings = settings
        self.most = most_connections() if most is None else most
        self.open: defaultdict[str, dict[Replaceable, None]] = defaultdict(dict)
        # Proxies are named explicitly; uvicorn's default, loopback, does not say that there is one.
        self._proxies = proxies()

    def enter(self, address: str, connection: Replaceable) -> bool:
        """Count a connection; False where its address has too many, or the process, and it is not counted."""
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
        """Close a connection of the network that has the most; False where that is the one that asks, or has no more than it."""
        largest = max(self.open, key=lambda name: len(self.open[name]))
        connections = self.open[largest]
        if len(connections) <= len(self.open.get(network, ())) + 1:
            return False
        replaced = next((each for each in connections if each.is_idle()), next(iter(connections)))
        metrics.CONNECTIONS_REFUSED.labels("process").inc()
        replaced.give_way()
        return True

    def exit(self, address: str, connection: Replaceable) -> None:
        """Count the end of a connection that `enter` let in."""
        network = network_of(address)
        connections = self.open[network]
        connections.pop(connection, None)
        if not connections:
            del self.open[network]


def proxies() -> set[str]:
    """Addresses whose ``X-Forwarded-For`` is believed: none where nobody has named one."""
    return {name.strip() for name in os.environ.get(_PROXIES, "").split(",") if name.strip()}


def server_options() -> dict[str, Any]:
    """Arguments of `uvicorn.Config` for every server of the API."""
    return {"http": LimitedHttp, "ws": "none", "log_config": None, "proxy_headers": bool(proxies())}


if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = object


class _Limited(_Base):
    """What is added to uvicorn's protocols, which have the same attributes."""

    _limits: Connections | None = None
    _address = ""
    _deadline: asyncio.TimerHandle | None = None
    _waits_for: Any = None
    _heads = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it; the first request has to begin now."""
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
        self._expect((_HEAD, self._heads))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._expect(None)
        if self._limits is not None:
            self._limits.exit(self._address, self)
            self._limits = None
        if isinstance(self.transport, WatchedTransport):
            self.transport.end()
        super().connection_lost(exc)

    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def give_way(self) -> None:
        """Close the connection for another one."""
        if self._limits is not None:
            self._limits.exit(self._address, self)
            self._limits = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, and set the deadline of the part that is waited for then."""
        for first in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            piece = data[first : first + _PIECE]
            super().data_received(piece)
            if self._is_too_large(len(piece)):
                self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "size")
                return
        self._expect(self._part())

    def _is_too_large(self, size: int) -> bool:  # noqa: ARG002 - h11 bounds what it holds by itself
        """Whether a piece of so many bytes was too much."""
        return False

    def _part(self) -> Any:
        """What is waited for now: a head, the body of a request, or nothing."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return _HEAD, self._heads
        return cycle if cycle.more_body else None

    def _expect(self, part: Any) -> None:
        """Wait for a part of a request, or for nothing. A deadline that runs for the same part goes on."""
        if part is not None and part == self._waits_for and self._deadline is not None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._waits_for, self._deadline = part, None
        if part is None or self._limits is None or self.transport.is_closing():
            return
        settings = self._limits.settings
        seconds = settings.header_seconds if isinstance(part, tuple) else settings.body_seconds
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        part, self._deadline = self._waits_for, None
        if self.flow.read_paused:  # the application has not taken what was sent: the client is not late
            self._waits_for = None
            self._expect(part)
            return
        if part == self._part():
            self._end(HTTPStatus.REQUEST_TIMEOUT, _HEAD if isinstance(part, tuple) else "body")

    def _end(self, status: HTTPStatus, what: str) -> None:
        """Refuse what is being received, and close; an answer that is due before it is given up."""
        metrics.CONNECTIONS_REFUSED.labels(what).inc()
        cycle: Any = self.cycle
        answered = cycle is None or cycle.response_complete
        if answered or (cycle.more_body and not cycle.response_started and not self._queued()):
            self._refuse(status)
        else:
            self.transport.abort()

    def _queued(self) -> int:
        """Requests that wait for the answer to an earlier one."""
        return 0

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer without a request, and close; what the client does not take within a second is dropped."""
        retry = f"retry-after: {_RETRY_SECONDS}\r\n" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{retry}content-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()
        self.loop.call_later(_FLUSH_SECONDS, self.transport.abort)


class LimitedH11(_Limited, H11Protocol):
    """For any installation."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = h11.Connection(h11.SERVER, MOST_HEAD)

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot read, or does not read because it is too large."""
        if len(self.conn.trailing_data[0]) > MOST_HEAD:
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "size")
        else:
            super().send_400_response(msg)


if HttpToolsProtocol is None:
    LimitedHttp: type[asyncio.Protocol] = LimitedH11
else:

    class LimitedHttpTools(_Limited, HttpToolsProtocol):  # type: ignore[misc]
        """For installations with httptools, whose parser calls the methods ``on_…``."""

        _in_head = False
        _lines = 0
        _frames = 0
        _body = 0

        _answering: Any = None

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget the connection, what nobody waits for, and the answer to an earlier request than uvicorn knows of."""
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
            """A request begins."""
            self._in_head = True
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Keep a header; a trailer is not kept, for the application would take it for one."""
            self._lines += 1
            if self._in_head:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """A head is complete."""
            self._in_head = False
            self._heads += 1
            super().on_headers_complete()
            self._forget_read()

        def on_body(self, body: bytes) -> None:
            """Keep a part of a body."""
            self._body += len(body)
            super().on_body(body)

        def on_response_complete(self) -> None:
            """An answer is complete; the next request that waits is answered."""
            super().on_response_complete()
            if not self._in_head:
                self._forget_read()

        def _forget_read(self) -> None:
            """Count anew, unless there are heads that wait."""
            if not self.pipeline:
                self._lines = self._frames = 0

        def _is_too_large(self, size: int) -> bool:
            self._frames = max(0, self._frames + size - (1 + _FRAME_BYTES) * self._body)
            self._body = 0
            return self._frames > MOST_HEAD or self._lines > MOST_LINES or self._queued() > MOST_QUEUED

        def _queued(self) -> int:
            return len(self.pipeline)

        def _part(self) -> Any:
            return (_HEAD, self._heads) if self._in_head else super()._part()

    LimitedHttp = LimitedHttpTools
"""The protocol that uvicorn would choose, with deadlines and limits: its argument ``http``."""


def _connections_of(app: Any) -> Connections:
    """The connections of the application that uvicorn has wrapped."""
    while not hasattr(app, "state"):
        app = app.app
    connections = app.state.connections
    assert isinstance(connections, Connections)
    return connections
