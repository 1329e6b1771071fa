"""Limits of connections: slow requests, and responses that nobody reads, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from tests.services.jobs import eventually
from watchstep.format.layout import SnapshotKey
from watchstep_services.api import streaming
from watchstep_services.api.middleware import connections
from watchstep_services.api.middleware.connections import LimitedHttp
from watchstep_services.api.middleware.transports import UnreadBytes
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

WAIT = 60.0
PLACE = "/v1/projects/vision/runs"
QUICK = {"header_seconds": 0.3, "body_seconds": 0.3}
PATIENT = {"header_seconds": WAIT, "body_seconds": WAIT}
SIZE = 24 * 1024 * 1024
VALUES = np.arange(SIZE // 4, dtype=np.int32)
LARGE_TENSOR = "/v1/projects/vision/runs/run-1/snapshots/a1/0/5/train/tensor?name=large"
MEGABYTE = 1024 * 1024


@contextmanager
def served(
    driven: Driven, protocol: type[asyncio.Protocol], **settings: float
) -> Iterator[tuple[tuple[str, int], str]]:
    """The address of a server, and an operator's token."""
    changed = driven.with_settings(**settings)
    token = create_token(driven.service.database, "operator", "vision")
    with serving(changed.service, protocol) as url:
        parts = urlsplit(url)
        yield (str(parts.hostname), int(parts.port or 0)), token


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=WAIT) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """All until the server closes the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def answer_of(connection: socket.socket) -> bytes:
    """One response, which may arrive in any pieces."""
    answer = b""
    while (end := answer.find(b"\r\n\r\n")) < 0:
        answer += (part := connection.recv(65536))
        assert part, answer
    (length,) = re.findall(rb"(?im)^content-length: (\d+)", answer[:end])
    while len(answer) < end + 4 + int(length):
        answer += (part := connection.recv(65536))
        assert part, answer
    return answer


def head(token: str, length: int) -> bytes:
    return (
        f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


BODY = b'{"run": "run-1"}'
GET_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
httptools_only = pytest.mark.parametrize("protocol", [LimitedHttp], ids=["httptools"])
"""h11 parses no further request before the first is answered."""


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "])
def test_a_head_that_is_not_complete_in_time_is_refused(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol], sent: bytes
) -> None:
    with served(driven_sqlite, protocol, header_seconds=0.3) as (address, _), connected(address) as half:
        half.sendall(sent)
        assert received(half).startswith(b"HTTP/1.1 408 ")


def test_slow_bytes_do_not_extend_a_deadline(driven_sqlite: Driven, protocol: type[asyncio.Protocol]) -> None:
    with served(driven_sqlite, protocol, header_seconds=0.3) as (address, _), connected(address) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        slow.settimeout(0.02)
        answer = b""
        while not answer:  # ends by the server's answer alone
            slow.sendall(b"a")
            try:
                answer = slow.recv(100)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("part", [b"", BODY[:5]])
def test_a_body_that_is_not_complete_in_time_is_refused(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol], part: bytes
) -> None:
    limits = {"header_seconds": WAIT, "body_seconds": 0.3}
    with served(driven_sqlite, protocol, **limits) as (address, token), connected(address) as half:
        half.sendall(head(token, len(BODY)) + part)
        assert received(half).startswith(b"HTTP/1.1 408 ")


def test_the_second_request_of_a_connection_has_a_deadline_of_its_own(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    with served(driven_sqlite, protocol, header_seconds=1) as (address, token), connected(address) as lasting:
        for _ in range(2):
            lasting.sendall(head(token, len(BODY)) + BODY)
            assert answer_of(lasting).startswith(b"HTTP/1.1 200 ")
        lasting.sendall(b"GET /healthz HT")
        assert received(lasting).endswith(b"connection: close\r\n\r\n")


def test_an_anonymous_request_with_half_a_body_is_closed(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    """It is answered before its body is read."""
    with served(driven_sqlite, protocol, **QUICK) as (address, _), connected(address) as half:
        half.sendall(head("wst_none", 1000) + b"{")
        assert received(half).startswith(b"HTTP/1.1 401 ")


def test_an_event_stream_has_no_deadline(driven_sqlite: Driven, protocol: type[asyncio.Protocol]) -> None:
    driven_sqlite.register()
    with served(driven_sqlite, protocol, **QUICK) as (address, token):
        place = f"http://{address[0]}:{address[1]}/v1/projects/vision/events/stream"
        headers = {"authorization": f"Bearer {token}"}
        with httpx.stream("GET", place, headers=headers, timeout=WAIT) as followed:
            assert followed.status_code == 200
            with connected(address) as half:
                received(half)  # so much later
            with connected(address) as half:
                received(half)
            assert next(followed.iter_lines()).startswith("retry:")


def test_connections_of_an_address_are_limited_and_closed_ones_make_room(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    with (
        served(driven_sqlite, protocol, address_connections=3, **PATIENT) as (address, token),
        ExitStack() as stack,
    ):
        first = stack.enter_context(connected(address))
        for _ in range(2):
            stack.enter_context(connected(address))
        with connected(address) as fourth:
            answer = received(fourth)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 5" in answer
        first.sendall(head(token, len(BODY)) + BODY)
        assert answer_of(first).startswith(b"HTTP/1.1 200 ")
        first.close()

        def answered() -> bool:
            with connected(address) as another:
                try:
                    another.sendall(head(token, len(BODY)) + BODY)
                    return another.recv(100).startswith(b"HTTP/1.1 200 ")
                except OSError:
                    return False

        eventually(answered)


def test_a_proxy_is_not_limited(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1, 10.0.0.1")
    limits = {"address_connections": 1, **PATIENT}
    with served(driven_sqlite, protocol, **limits) as (address, token), ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(connected(address))
            connection.sendall(head(token, len(BODY)) + BODY)
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_the_service_responds_despite_many_incomplete_requests(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    limits = {"header_seconds": 2, "address_connections": 200}
    with served(driven_sqlite, protocol, **limits) as (address, token), ExitStack() as stack:
        halves = [stack.enter_context(connected(address)) for _ in range(150)]
        for half in halves:
            half.sendall(b"GET / HTTP/1.1\r\nX: ")
        with connected(address) as good:
            good.sendall(head(token, len(BODY)) + BODY)
            assert answer_of(good).startswith(b"HTTP/1.1 200 ")
        assert {received(half)[:13] for half in halves} == {b"HTTP/1.1 408 "}


def test_the_embedded_service_has_the_limits(tmp_path: Path) -> None:
    settings = load_settings(
        store=f"{tmp_path}/store", home=f"{tmp_path}/home", header_seconds=0.3, address_connections=2
    )
    with EmbeddedService(settings) as service:
        parts = urlsplit(service.url)
        address = (str(parts.hostname), int(parts.port or 0))
        with connected(address) as first_socket, connected(address) as second_socket:
            assert received(first_socket).startswith(b"HTTP/1.1 408 ")
            assert received(second_socket).startswith(b"HTTP/1.1 408 ")


LARGE = 80 * 1024
POST = b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"a:b\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\na: ", b"b"),
        (b"GET /", b"b"),
        (b"", b"\r\n"),
        (CHUNKED + b"0\r\n", b"a:b\r\n"),
        (CHUNKED + b"1;", b"a"),
    ],
    ids=["lines", "line", "url", "empty lines", "trailers", "chunk extension"],
)
def test_an_endless_head_is_refused(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol], begin: bytes, more: bytes
) -> None:
    with served(driven_sqlite, protocol, **PATIENT) as (address, token), connected(address) as endless:
        begun = begin % (PLACE.encode(), token.encode()) if b"%s" in begin else begin
        endless.sendall(begun + more * (LARGE // len(more)))
        answer = received(endless)
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ") if not begin else b"HTTP/1.1 431 ")


@httptools_only
def test_many_header_lines_are_refused_before_the_head_is_complete(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    with served(driven_sqlite, protocol, **PATIENT) as (address, _), connected(address) as endless:
        endless.sendall(
            b"GET /healthz HTTP/1.1\r\n" + b"a:b\r\n" * 202
        )  # the parser gives a line once the next begins
        assert received(endless).startswith(b"HTTP/1.1 431 ")


def test_a_head_within_the_limits_is_read_in_any_pieces(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol]
) -> None:
    headers = b"".join(b"x-%d: %s\r\n" % (line, b"v" * 1000) for line in range(28))
    with served(driven_sqlite, protocol, **PATIENT) as (address, token), connected(address) as connection:
        for _ in range(3):  # what is counted begins anew
            connection.sendall(head(token, len(BODY))[:-2] + headers + b"\r\n" + BODY)
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_may_have_chunks_of_one_byte(driven_sqlite: Driven, protocol: type[asyncio.Protocol]) -> None:
    body = BODY + b" " * 20_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with served(driven_sqlite, protocol, **PATIENT) as (address, token), connected(address) as connection:
        connection.sendall(CHUNKED % (PLACE.encode(), token.encode()) + chunks)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_a_trailer_is_not_a_header(driven_sqlite: Driven, protocol: type[asyncio.Protocol]) -> None:
    with served(driven_sqlite, protocol, **PATIENT) as (address, token), connected(address) as connection:
        chunk = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer %s\r\n\r\n" % (len(BODY), BODY, token.encode())
        connection.sendall(CHUNKED.replace(b"Authorization: Bearer %s\r\n", b"") % PLACE.encode() + chunk)
        assert answer_of(connection).startswith(b"HTTP/1.1 401 ")


def test_pipelined_requests_are_answered(driven_sqlite: Driven, protocol: type[asyncio.Protocol]) -> None:
    with served(driven_sqlite, protocol, **PATIENT) as (address, _), connected(address) as connection:
        connection.sendall(GET_HEALTH * 9 + GET_HEALTH.replace(b"x", b"x\r\nConnection: close", 1))
        assert received(connection).count(b"HTTP/1.1 200 ") == 10


def followed(token: str) -> bytes:
    """A request whose answer has no end."""
    return (
        f"GET /v1/projects/vision/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()


@httptools_only
@pytest.mark.parametrize("sent", [b"GET /healthz HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 30])
def test_incomplete_heads_and_many_requests_behind_a_response_are_refused(
    driven_sqlite: Driven,
    protocol: type[asyncio.Protocol],
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
) -> None:
    with served(driven_sqlite, protocol, **QUICK) as (address, token), connected(address) as connection:
        connection.sendall(followed(token))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        connection.sendall(sent)
        assert b"HTTP/1.1 " not in received(connection)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_stream_ends_with_its_connection_despite_a_queued_request(
    driven_sqlite: Driven,
    protocol: type[asyncio.Protocol],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        streaming, "HEARTBEAT_SECONDS", 0.2
    )  # a closed connection is noticed on the next write
    with served(driven_sqlite, protocol, token_event_streams=1, **PATIENT) as (address, token):
        with connected(address) as connection:
            connection.sendall(followed(token))
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
            connection.sendall(GET_HEALTH)

        def answered() -> bool:
            with connected(address) as another:
                another.sendall(followed(token))
                return another.recv(100).startswith(b"HTTP/1.1 200 ")

        eventually(answered)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.ci
@pytest.mark.parametrize(("proxies", "last"), [(None, b"429"), ("127.0.0.1", b"401")])
def test_a_forwarded_address_is_accepted_from_configured_proxies_only(
    driven_sqlite: Driven,
    protocol: type[asyncio.Protocol],
    monkeypatch: pytest.MonkeyPatch,
    proxies: str | None,
    last: bytes,
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if proxies is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", proxies)
    with served(driven_sqlite, protocol, failures_per_minute=3, **PATIENT) as (address, _):
        for client in range(6):
            with connected(address) as connection:
                connection.sendall(
                    b"GET /v1/rules HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wst_none\r\n"
                    b"X-Forwarded-For: 10.0.%d.1\r\n\r\n" % client
                )
                answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 %s " % last)


class _Idle:
    """A connection that waits between two requests."""

    def __init__(self, address: str, counted: connections.Connections, *, idle: bool = True) -> None:
        self.address, self.counted, self.idle, self.closed = address, counted, idle, False

    def is_idle(self) -> bool:
        return self.idle

    def evict(self) -> None:
        self.closed = True
        self.counted.exit(self.address, self)


def test_an_ipv6_network_counts_as_one_address() -> None:
    counted = connections.Connections(load_settings(address_connections=1))
    first = _Idle("2001:db8::1", counted)
    assert counted.enter("2001:db8::1", first)
    assert not counted.enter("2001:db8::2", _Idle("2001:db8::2", counted))
    assert counted.enter("2001:db8:0:1::1", _Idle("2001:db8:0:1::1", counted))
    counted.exit("2001:db8::1", first)
    assert counted.enter("2001:db8::2", _Idle("2001:db8::2", counted))


def test_a_full_process_closes_an_idle_connection_of_the_address_with_the_most() -> None:
    counted = connections.Connections(load_settings(), most=4)
    busy = _Idle("10.0.0.1", counted, idle=False)
    many = [busy, *(_Idle("10.0.0.1", counted) for _ in range(3))]
    assert all(counted.enter("10.0.0.1", each) for each in many)
    assert counted.enter("10.0.0.2", _Idle("10.0.0.2", counted))
    assert [each.closed for each in many] == [False, True, False, False]
    assert not counted.enter("10.0.0.1", _Idle("10.0.0.1", counted))
    assert sum(map(len, counted.open.values())) == 4


def test_the_service_responds_despite_connections_of_many_addresses(
    driven_sqlite: Driven, protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    with served(driven_sqlite, protocol, **PATIENT) as (address, token), ExitStack() as stack:
        for number in range(40):
            source = (f"127.0.0.{2 + number % 3}", 0)
            connection = stack.enter_context(socket.create_connection(address, WAIT, source))
            connection.sendall(GET_HEALTH)
            with suppress(OSError):
                connection.recv(65536)
        with connected(address) as good:
            good.sendall(head(token, len(BODY)) + BODY)
            assert answer_of(good).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def recorded(driven_sqlite: Driven) -> Driven:
    from safetensors.numpy import save

    recording = driven_sqlite.recording().begin()
    recording.store.put(SnapshotKey("a1", 0, 5, "train").path, save({"large": VALUES}))
    driven_sqlite.register()
    return driven_sqlite


@contextmanager
def unread_request(address: tuple[str, int], token: str, path: str = LARGE_TENSOR) -> Iterator[socket.socket]:
    """A connection with a small buffer that has sent a request."""
    with socket.socket() as client_socket:
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client_socket.settimeout(WAIT)
        client_socket.connect(address)
        client_socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        yield client_socket


def reset(connection: socket.socket) -> bool:
    """Whether the server ends the connection, without reading of it."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(WAIT * 1000))


def test_a_client_that_reads_nothing_is_disconnected(
    recorded: Driven, protocol: type[asyncio.Protocol], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        served(recorded, protocol, write_seconds=0.4) as (address, token),
        unread_request(address, token) as slow,
    ):
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert reset(slow)
        with unread_request(address, token, "/healthz") as other:
            assert other.recv(12) == b"HTTP/1.1 200"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_slow_client_gets_the_whole_response(recorded: Driven, protocol: type[asyncio.Protocol]) -> None:
    with served(recorded, protocol) as (address, token):
        url = f"http://{address[0]}:{address[1]}{LARGE_TENSOR}"
        headers = {"authorization": f"Bearer {token}"}
        whole = httpx.get(url, headers=headers, timeout=WAIT)
        assert (whole.status_code, whole.headers["content-length"]) == (200, str(SIZE))
        assert whole.content == VALUES.tobytes()
        first, last = 3 * MEGABYTE + 1, 13 * MEGABYTE + 1
        piece = httpx.get(url, headers={**headers, "range": f"bytes={first}-{last}"}, timeout=WAIT)
        assert (piece.status_code, piece.headers["content-range"]) == (206, f"bytes {first}-{last}/{SIZE}")
        assert piece.content == VALUES.tobytes()[first : last + 1]


def test_unread_bytes_of_a_token_are_limited_and_others_continue(
    recorded: Driven, protocol: type[asyncio.Protocol]
) -> None:
    other = create_token(recorded.service.database, "viewer", "vision")
    with served(recorded, protocol, unread_mb=20, write_seconds=WAIT) as (address, token):
        with unread_request(address, token) as slow:
            assert slow.recv(12) == b"HTTP/1.1 200"
            url = f"http://{address[0]}:{address[1]}{LARGE_TENSOR}"
            refused = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=WAIT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            # A part of it, not all of it, is what the slow one holds.
            assert f"{4 * MEGABYTE} bytes of responses are unread" in refused.json()["detail"]
            with unread_request(address, other) as second:
                assert second.recv(12) == b"HTTP/1.1 200"

        def answered() -> bool:
            with unread_request(address, token) as again:
                return again.recv(12) == b"HTTP/1.1 200"

        eventually(answered)


def test_shares_of_tokens_projects_and_the_process() -> None:
    unread = UnreadBytes(8)
    unread.reserve(3 * MEGABYTE, "vision", "first")  # more than its share, but its only one
    with pytest.raises(RequestRefusedError, match="token first: 3145728 bytes"):
        unread.reserve(1, "vision", "first")
    unread.reserve(MEGABYTE, "vision", "second")
    with pytest.raises(RequestRefusedError, match="project vision"):
        unread.reserve(MEGABYTE, "vision", "third")
    unread.reserve(4 * MEGABYTE, "text", "fourth")
    with pytest.raises(RequestRefusedError, match="the process"):
        unread.reserve(MEGABYTE, None, "fifth")
    unread.release(3 * MEGABYTE, "vision", "first")
    unread.reserve(MEGABYTE, None, "fifth")
    unread.reserve(MEGABYTE, "vision", "first")
