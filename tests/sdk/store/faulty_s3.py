"""An S3 server with configurable faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

Fault = Literal[
    "none",
    "error",
    "unavailable",
    "denied",
    "stall",
    "reset",
    "truncate",
    "lost_answer",
    "late",
    "late_answer",
]

_STATUS = {"error": 500, "unavailable": 503, "denied": 403}


class FaultyS3:
    """Keeps what is put in memory.

    Attributes:
        objects: path → bytes, of what arrived whole.
        fault: what it does with requests from now on: answer 500, 503 or 403; not answer for a minute; reset; break off
            in the middle of the body, of a PUT or a GET; do what is asked and reset before the answer; do it once it
            is released; do it at once, and answer once it is released.
        only: requests meet the fault whose path has this in it.
        exclusive: whether a name that is taken is kept; some services ignore that this is asked for.
        released: set to let stalled requests go on.
        met: set once a request has met the fault.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault = "none"
        self.only = ""
        self.exclusive = True
        self._lock = threading.Lock()
        self.released = threading.Event()
        self.met = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(), bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.server_bind()  # a port, at which connections are refused until somebody listens
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        s3 = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_PUT(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                fault = s3.fault if s3.only in self.path else "none"
                if fault == "truncate":
                    self.rfile.read(length // 2)
                    s3._break_off(self)
                    return
                body = self.rfile.read(length)
                if s3._misbehaves(self):
                    return
                with s3._lock:
                    exclusive = bool(self.headers.get("If-None-Match")) and s3.exclusive
                    taken = exclusive and self.path in s3.objects
                    if not taken:
                        s3.objects[self.path] = body
                if fault == "late_answer":
                    s3.met.set()
                    s3.released.wait(60)
                if fault == "lost_answer":
                    s3._break_off(self)
                    return
                self._answer(412 if taken else 200)

            def do_GET(self) -> None:
                if s3._misbehaves(self):
                    return
                if "list-type=2" in self.path:
                    self._answer(200, s3._listing(self.path))
                    return
                body = s3.objects.get(self.path)
                if s3.fault == "truncate":
                    self._headers(200, 1000)
                    self.wfile.write(b"x" * 500)
                    s3._break_off(self)
                    return
                self._answer(404 if body is None else 200, body or b"")

            def _answer(self, status: int, body: bytes = b"") -> None:
                try:
                    self._headers(status, len(body))
                    self.wfile.write(body)
                except ConnectionError:  # the client is gone
                    self.close_connection = True

            def _headers(self, status: int, length: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
                self.end_headers()

        return Handler

    def _listing(self, path: str) -> bytes:
        address = urlsplit(path)
        prefix = f"{address.path.rstrip('/')}/{parse_qs(address.query).get('prefix', [''])[0]}"
        with self._lock:
            found = {name: len(data) for name, data in self.objects.items() if name.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{name.split('/', 2)[2]}</Key><Size>{size}</Size><ETag>&quot;1&quot;</ETag>"
            "<LastModified>2026-11-20T00:00:00.000Z</LastModified></Contents>"
            for name, size in sorted(found.items())
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

    def _misbehaves(self, request: BaseHTTPRequestHandler) -> bool:
        fault = self.fault if self.only in request.path else "none"
        if fault in {"none", "truncate", "lost_answer", "late_answer"}:
            return False
        self.met.set()
        if fault == "late":
            self.released.wait(60)
            return False
        if fault == "stall":
            self.released.wait(60)
        if fault in {"reset", "stall"}:
            self._break_off(request)
            return True
        request.send_response(_STATUS[fault])
        request.send_header("Content-Length", "0")
        request.end_headers()
        return True

    def _break_off(self, request: BaseHTTPRequestHandler) -> None:
        self.met.set()
        request.close_connection = True
        request.connection.close()

    def listen(self) -> None:
        """Accept connections."""
        self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @contextmanager
    def serving(self, *, listening: bool = True) -> Iterator[FaultyS3]:
        """Until the end of the block; refused are connections to a server that does not listen."""
        if listening:
            self.listen()
        try:
            yield self
        finally:
            self.released.set()
            if self._thread is not None:
                self._server.shutdown()
            self._server.server_close()
