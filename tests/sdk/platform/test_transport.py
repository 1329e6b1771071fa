"""Requests to a service: connections are reused, and requests are repeated where that is safe and useful."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.store.dripping_server import ANSWERS, dripping
from tests.services.channels.certificates import Certificate, make_certificate
from watchstep.errors import ServiceError
from watchstep.platform.transport import (
    ServiceAddress,
    ServiceRefusedError,
    Transport,
    UnreachableError,
    pause_seconds,
    retry_after,
)


class Server(ThreadingHTTPServer):
    """Answers with the body of the request; counts connections; closes them after answers if configured to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.requested: list[str] = []
        self.keys: list[str | None] = []
        self.answers: list[tuple[int, str]] = []
        """Status and Retry-After of the next answers; 200 when there is none. 0 breaks the connection."""
        self.leaves = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requested.append(self.path)
        self.server.keys.append(self.headers["idempotency-key"])
        status, after = self.server.answers.pop(0) if self.server.answers else (200, "")
        if status == 0:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if after:
            self.send_header("retry-after", after)
        self.end_headers()
        self.wfile.write(body)
        if self.server.leaves:  # and says nothing of it
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def do_GET(self) -> None:
        self.headers["content-length"] = "0"
        self.do_POST()

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


class Waits(list[float]):
    """What a transport waited."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def transport(server: Server, waits: Waits) -> Transport:
    return Transport(ServiceAddress(f"{server.url}/below"), 60.0, wait=waits)


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    with listener.accept()[0] as connection:
        connection.recv(65536)
        connection.sendall(answer)


def post(transport: Transport, body: object = "yes", **more: Any) -> bytes:
    return transport.fetch("POST", "/it", {"x": 1}, body, **more)[0]


def test_one_connection_serves_for_all(transport: Transport, server: Server, waits: Waits) -> None:
    assert post(transport, "a") == b'"a"'
    server.answers = [(422, "")]
    with pytest.raises(ServiceRefusedError):
        post(transport)
    assert post(transport, "c") == b'"c"'
    assert server.connections == 1
    assert server.requested == ["/below/it?x=1"] * 3
    assert len(set(server.keys)) == 3
    assert not waits


def test_a_connection_that_was_closed_meanwhile_is_opened_again(
    transport: Transport, server: Server, waits: Waits
) -> None:
    server.leaves = True
    assert [post(transport) for _ in range(3)] == [b'"yes"'] * 3
    assert server.connections == 3
    assert not waits


def test_an_answer_that_is_not_read_to_its_end_ends_its_connection(
    transport: Transport, server: Server
) -> None:
    with pytest.raises(ServiceError, match="over 3 bytes"):
        post(transport, "1234567", max_bytes=3)
    assert post(transport) == b'"yes"'
    assert server.connections == 2


def test_a_forked_child_uses_none_of_its_parents(
    transport: Transport, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(transport)
    monkeypatch.setattr("watchstep.platform.transport.os.getpid", lambda: -1)
    assert post(transport) == b'"yes"'
    assert server.connections == 2


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_passes_is_tried_again(
    transport: Transport, server: Server, waits: Waits, status: int, method: str
) -> None:
    server.answers = [(status, ""), (status, ""), (status, "")]
    transport.fetch(method, "/it")
    assert len(server.requested) == 4
    for tries, wait in enumerate(waits):
        assert 0.25 * 2**tries <= wait <= 0.5 * 2**tries
    assert len(set(server.keys)) == 1, "the service knows that it is the same request"
    assert (server.keys[0] is None) == (method == "GET")
    server.answers = [(status, "")] * 4
    with pytest.raises(ServiceRefusedError) as refusal:
        transport.fetch(method, "/it")
    assert refusal.value.status == status


def test_a_retry_waits_for_the_time_that_the_service_states(
    transport: Transport, server: Server, waits: Waits
) -> None:
    server.answers = [(429, "7"), (503, "Fri, 20 Nov 2020 00:00:00 GMT"), (503, "999999")]
    post(transport)
    assert 7 <= waits[0] <= 7.7
    assert waits[1] == 0
    assert 300 <= waits[2] <= 330
    server.answers = [(409, "1")]
    with pytest.raises(ServiceRefusedError):
        post(transport)
    assert len(waits) == 3, "a conflict does not pass"


def test_a_refused_connection_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    waited: list[float] = []

    def listen(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            listener = listening.enter_context(socket.create_server(address))
            answering.append(threading.Thread(target=_answer_once, args=(listener, answer)))
            answering[0].start()

    answering: list[threading.Thread] = []
    with ExitStack() as listening:
        transport = Transport(ServiceAddress(f"http://127.0.0.1:{address[1]}"), 60.0, wait=listen)
        assert transport.call("POST", "/", None, {}) == {}
        answering[0].join()
    assert len(waited) == 2
    assert len(set(waited)) == 2


def test_no_answer_states_why(server: Server, waits: Waits) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    gone = Transport(ServiceAddress(f"http://127.0.0.1:{port}"), 60.0, tries=1, wait=waits)
    with pytest.raises(UnreachableError, match=r"does not respond \(\[Errno 111\] Connection refused\)"):
        gone.fetch("GET", "/")
    assert not waits
    with socket.create_server(("127.0.0.1", 0)) as mute:
        never = Transport(ServiceAddress(f"http://127.0.0.1:{mute.getsockname()[1]}"), 0.05, wait=waits)
        with pytest.raises(UnreachableError, match="timed out") as late:
            never.fetch("GET", "/")
        assert late.value.timed_out
    assert not waits, "what has taken too long would take as long again"


def test_a_broken_connection_is_no_answer(transport: Transport, server: Server, waits: Waits) -> None:
    server.answers = [
        (0, ""),
        (0, ""),
    ]  # the second at once, for the first may have been an idle connection's
    assert post(transport) == b'"yes"'
    assert len(waits) == 1
    assert len(set(server.keys)) == 1


def test_a_response_that_is_not_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as odd:
        thread = threading.Thread(target=_answer_once, args=(odd, b"I am no web server\r\n\r\n"))
        thread.start()
        address = ServiceAddress(f"http://127.0.0.1:{odd.getsockname()[1]}")
        with pytest.raises(UnreachableError, match="does not respond"):
            Transport(address, 60.0, tries=1).fetch("GET", "/")
        thread.join()


def test_a_proxy_of_the_environment_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//user:secret@"))
    far = Transport(ServiceAddress("http://service.invalid"), 60.0)
    assert far.fetch("POST", "/a", None, "yes")[0] == b'"yes"'
    server.answers = [(422, "")]
    with pytest.raises(ServiceRefusedError):
        far.fetch("POST", "/a", None, "no")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert Transport(ServiceAddress(server.url), 60.0).fetch("POST", "/b", None, "yes")[0] == b'"yes"'
    assert server.requested == ["http://service.invalid/a"] * 2 + ["/b"]


def test_pauses_differ() -> None:
    assert len({pause_seconds(3) for _ in range(20)}) > 1
    assert max(pause_seconds(50) for _ in range(20)) <= 10


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("-1", None), ("", None), ("soon", None), ("9" * 400, 999999999.0)],
)
def test_retry_after(text: str, seconds: float | None) -> None:
    assert retry_after(text) == seconds


@pytest.mark.parametrize("part", ANSWERS)
def test_a_bounded_request_ends_although_its_answer_continues(part: str, waits: Waits) -> None:
    with dripping(part) as url:
        bounded = Transport(ServiceAddress(url), 0.3, bounds_request=True, wait=waits)
        with pytest.raises(UnreachableError, match="timed out") as late:
            bounded.fetch("POST", "/", None, {})
    assert late.value.timed_out
    assert not waits


def test_bounded_requests_share_a_connection(server: Server) -> None:
    bounded = Transport(ServiceAddress(server.url), 60.0, bounds_request=True)
    assert [post(bounded, "x" * 100_000) for _ in range(3)] == [b'"' + b"x" * 100_000 + b'"'] * 3
    assert server.connections == 1


def test_a_problem_of_another_service_is_not_final(transport: Transport, server: Server) -> None:
    """Otherwise a gateway in front of a service that restarts would keep a program from starting."""
    server.answers = [(400, "")]
    with pytest.raises(ServiceRefusedError, match="a") as refused:
        post(transport, {"type": "https://gateway.example/refused", "detail": "a", "hint": "b"})
    assert not refused.value.is_final


class EmptyAnswer(BaseHTTPRequestHandler):
    """Answers with an empty object, and closes the connection."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_arguments: Any) -> None:
        pass


class TlsServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that refuses the certificate is expected."""


@contextmanager
def serving(certificate: Certificate) -> Iterator[Transport]:
    with TlsServer(("127.0.0.1", 0), EmptyAnswer) as server:
        server.socket = certificate.server_context().wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Transport(
            ServiceAddress.checked(f"https://127.0.0.1:{server.server_address[1]}", "t"), 10.0, tries=1
        )
        server.shutdown()
        thread.join()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path)


def test_a_certificate_of_an_unknown_authority_is_refused(certificate: Certificate) -> None:
    with (
        serving(certificate) as transport,
        pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        transport.call("GET", "/")


def test_the_systems_authorities_are_read_once_for_many_connections(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    reads = []
    load = ssl.SSLContext.load_default_certs

    def counted(context: ssl.SSLContext, *arguments: Any) -> None:
        reads.append(context)
        load(context, *arguments)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counted)
    with serving(certificate) as transport:
        for _ in range(5):  # each has a connection of its own, because the server closes them
            assert transport.call("GET", "/") == {}
    assert len(reads) == 1


def test_certificates_of_authorities_that_change_are_read_again(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(other.path.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    monkeypatch.setattr("watchstep.platform.transport._TLS_SECONDS", 0.0)
    with serving(certificate) as transport:
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            transport.call("GET", "/")
        authorities.write_bytes(certificate.path.read_bytes())
        assert transport.call("GET", "/") == {}
