"""An S3 server that can be told to misbehave: to refuse, stall, answer 500, or reset the connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["none", "error", "denied", "stall", "reset"]


class FaultyS3:
    """Keeps what is put in memory.

    Attributes:
        objects: path → bytes, of what arrived whole.
        fault: what it does with requests from now on.
        released: set to let stalled requests go on.
        met: set once a request has met the fault.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault = "none"
        self.released = threading.Event()
        self.met = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        held = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if held._misbehaves(self):
                    return
                if self.headers.get("If-None-Match") and self.path in held.objects:
                    self._answer(412)
                    return
                held.objects[self.path] = body
                self._answer(200)

            def do_GET(self) -> None:
                if held._misbehaves(self):
                    return
                body = held.objects.get(self.path)
                self._answer(404 if body is None else 200, body or b"")

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
                self.end_headers()
                self.wfile.write(body)

        return Handler

    def _misbehaves(self, request: BaseHTTPRequestHandler) -> bool:
        fault = self.fault
        if fault == "none":
            return False
        self.met.set()
        if fault == "stall":
            self.released.wait(60)
        if fault in {"reset", "stall"}:
            request.close_connection = True
            request.connection.close()
            return True
        request.send_response(500 if fault == "error" else 403)
        request.send_header("Content-Length", "0")
        request.end_headers()
        return True

    @contextmanager
    def serving(self) -> Iterator[FaultyS3]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()
