"""An S3 server for one multipart upload that refuses all but the first few parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BEGUN = b"<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"


class PartsServer:
    """Keeps nothing.

    Attributes:
        began, aborted, completed: uploads.
    """

    def __init__(self, good_parts: int) -> None:
        self.began = self.aborted = self.completed = 0
        self._good_parts = good_parts
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(404)

            def do_POST(self) -> None:
                self._read()
                begins = "uploads" in self.path
                server.began += begins
                server.completed += not begins
                self._answer(200, _BEGUN if begins else b"")

            def do_PUT(self) -> None:
                self._read()
                number = int(self.path.split("partNumber=")[1].split("&")[0])
                self._answer(200 if number <= server._good_parts else 403)

            def do_DELETE(self) -> None:
                server.aborted += 1
                self._answer(204)

            def _read(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.end_headers()
                self.wfile.write(body)

        return Handler

    @contextmanager
    def serving(self) -> Iterator[PartsServer]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
