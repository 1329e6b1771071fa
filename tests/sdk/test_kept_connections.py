"""Requests of the SDK to the service go over connections that are kept, and need none that is."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from watchstep.capture.kept_connections import Answer, KeptConnections

MOST = 1 << 20


class Server(ThreadingHTTPServer):
    """Answers with the body that it was sent; counts connections; closes them after answers if it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.asked: list[str] = []
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
        self.server.asked.append(self.path)
        self.send_response(200 if body != b"no" else 422)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.server.leaves:  # and says nothing of it
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, *_said: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def kept(server: Server) -> KeptConnections:
    return KeptConnections(f"{server.url}/below")


def post(kept: KeptConnections, server: Server, body: bytes = b"yes") -> tuple[int, bytes]:
    answer = kept.post(f"{server.url}/below/it?x=1", body, {"X": "y"}, 60.0, MOST)
    return answer.status, answer.content


def test_one_connection_serves_for_all(kept: KeptConnections, server: Server) -> None:
    assert [post(kept, server, body) for body in (b"a", b"no", b"c")] == [
        (200, b"a"),
        (422, b"no"),
        (200, b"c"),
    ]
    assert server.connections == 1
    assert server.asked == ["/below/it?x=1"] * 3


def test_a_connection_that_was_closed_meanwhile_is_opened_again(
    kept: KeptConnections, server: Server
) -> None:
    server.leaves = True
    assert [post(kept, server) for _ in range(3)] == [(200, b"yes")] * 3
    assert server.connections == 3


def test_an_answer_that_is_not_read_to_its_end_ends_its_connection(
    kept: KeptConnections, server: Server
) -> None:
    assert kept.post(server.url + "/", b"12345", {}, 60.0, 3) == Answer(200, b"123")
    assert post(kept, server) == (200, b"yes")
    assert server.connections == 2


def test_a_forked_child_uses_none_of_its_parents(
    kept: KeptConnections, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(kept, server)
    monkeypatch.setattr("watchstep.capture.kept_connections.os.getpid", lambda: -1)
    assert post(kept, server) == (200, b"yes")
    assert server.connections == 2


def test_no_answer_is_an_os_error(kept: KeptConnections, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    gone = KeptConnections(f"http://127.0.0.1:{port}")
    with pytest.raises(OSError, match="refused"):
        gone.post(f"http://127.0.0.1:{port}/", b"", {}, 60.0, MOST)
    with socket.create_server(("127.0.0.1", 0)) as odd:
        port = odd.getsockname()[1]
        thread = threading.Thread(target=_say_nonsense, args=(odd,))
        thread.start()
        with pytest.raises(OSError, match="no HTTP"):
            KeptConnections(f"http://127.0.0.1:{port}").post(f"http://127.0.0.1:{port}/", b"", {}, 60.0, MOST)
        thread.join()
    assert post(kept, server) == (200, b"yes")


def _say_nonsense(odd: socket.socket) -> None:
    with odd.accept()[0] as one:
        one.recv(65536)
        one.sendall(b"I am no web server\r\n\r\n")


def test_a_proxy_is_asked_where_the_environment_names_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", server.url)
    far = KeptConnections("http://service.invalid")
    assert far.post("http://service.invalid/a", b"yes", {}, 60.0, MOST) == Answer(200, b"yes")
    assert far.post("http://service.invalid/a", b"no", {}, 60.0, MOST) == Answer(422, b"no")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert post(KeptConnections(server.url), server) == (200, b"yes")
    assert server.asked == ["http://service.invalid/a"] * 2 + ["/below/it?x=1"]
