"""What the service is told, and what its answers change in a recorder: only how often it announces."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from watchstep import Bounds, CaptureConfig, Hook
from watchstep.capture.service_client import ServiceAddress, ServiceClient
from watchstep.control import ControlDocument
from watchstep.layout import SegmentKey, WriterId

KEY = SegmentKey(WriterId("a1", "node", "w0"), 0, 0, 3)


@dataclass
class Listening:
    """A service that only listens.

    Attributes:
        address: where it is.
        added: what it adds to its next answers.
        told: where and what it was told.
    """

    address: ServiceAddress
    added: dict[str, Any] = field(default_factory=dict)
    told: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def announced(self) -> dict[int, bool]:
        """Steps that were announced, and whether as urgent."""
        return {body["last"]: body["urgent"] for path, body in self.told if path.endswith("/announcements")}


@pytest.fixture
def service() -> Iterator[Listening]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["content-length"])))
            listening.told.append((self.path, said))
            body = json.dumps({"control": ControlDocument().as_data(), **listening.added}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        listening = Listening(ServiceAddress.checked(f"http://127.0.0.1:{server.server_address[1]}", "t"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield listening
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("told", "kept"),
    [(2.5, 2.5), (0, 0.0), (1e9, 30.0), (-1, 0.0), ("7", 0.0), (None, 0.0), (True, 0.0), (float("nan"), 0.0)],
)
def test_a_service_that_lags_asks_for_a_pause(service: Listening, told: object, kept: float) -> None:
    client = ServiceClient(service.address, "vision")
    assert client.pause_seconds == 0.0
    service.added["pause_seconds"] = told
    assert client.announce("r", KEY, {}) == ControlDocument()
    assert client.pause_seconds == kept
    service.added.clear()
    client.announce("r", KEY, {})
    assert client.pause_seconds == 0.0


def test_what_has_just_become_nan_is_announced_as_urgent(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_SERVICE", service.address.url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    deadline = time.monotonic() + 60
    with Hook(tmp_path, run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=0.001))) as hook:
        for step, loss in enumerate((1.0, float("nan"))):
            hook.log(loss=loss)
            hook.step()
            hook.log(loss=loss)  # the step before is handed over
            while step not in service.announced:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert service.announced[0] is False
    assert service.announced[1] is True
