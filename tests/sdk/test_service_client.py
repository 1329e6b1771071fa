"""What the service's answers change in a recorder: only how often it announces."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from watchstep.capture.service_client import ServiceAddress, ServiceClient
from watchstep.control import ControlDocument
from watchstep.layout import SegmentKey, WriterId

KEY = SegmentKey(WriterId("a1", "node", "w0"), 0, 0, 3)


@pytest.fixture
def answers() -> Iterator[tuple[ServiceClient, dict[str, Any]]]:
    """A client, and what the service adds to its next answers."""
    added: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps({"control": ControlDocument().as_data(), **added}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = ServiceAddress.checked(f"http://127.0.0.1:{server.server_address[1]}", "t")
        yield ServiceClient(address, "vision"), added
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("told", "kept"),
    [(2.5, 2.5), (0, 0.0), (1e9, 30.0), (-1, 0.0), ("7", 0.0), (None, 0.0), (True, 0.0), (float("nan"), 0.0)],
)
def test_a_service_that_lags_asks_for_a_pause(
    answers: tuple[ServiceClient, dict[str, Any]], told: object, kept: float
) -> None:
    client, added = answers
    assert client.pause_seconds == 0.0
    added["pause_seconds"] = told
    assert client.announce("r", KEY, {}) == ControlDocument()
    assert client.pause_seconds == kept
    added.clear()
    client.announce("r", KEY, {})
    assert client.pause_seconds == 0.0
