"""A real HTTP server that answers, or fails, as a test says."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class HttpServer:
    """What came in; ``answers`` says what follows: the next of them, then 204."""

    port: int = 0
    scheme: str = "http"
    answers: list[Answering] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The bodies as JSON."""
        return [json.loads(body) for body in list(self.bodies)]

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook/secret-path"


def status(code: int, body: bytes = b"", **headers: str) -> Answering:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Cut the connection in the middle."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    handler.connection.close()


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Send a body that never ends, until nobody reads it."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x" * 65536)


def stall(server: HttpServer) -> Answering:
    """Send nothing until the test is over."""

    def answer(_handler: BaseHTTPRequestHandler) -> None:
        server.released.wait(60)

    return answer


def drip(server: HttpServer) -> Answering:
    """Send a header byte by byte, each before any timeout of one read."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not server.released.wait(0.01):
                handler.wfile.write(b"x")

    return answer


@contextmanager
def http_server(context: ssl.SSLContext | None = None) -> Iterator[HttpServer]:
    held = HttpServer(scheme="http" if context is None else "https")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            held.headers.append({name.lower(): value for name, value in self.headers.items()})
            held.paths.append(self.path)
            held.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            (held.answers.pop(0) if held.answers else status(204))(self)
            self.close_connection = True

        def log_message(self, *_arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_arguments: Any) -> None:
            pass  # what tests do on purpose

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    held.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield held
    finally:
        held.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
