"""A webhook receiver: a real HTTP server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """What came in, and what is answered: the next of ``answers``, then 204."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on a free port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.types.append(self.headers["content-type"])
            receiver.events.append(json.loads(body))
            self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/alerts"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
