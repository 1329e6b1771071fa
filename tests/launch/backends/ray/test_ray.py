"""What Ray answers that is no job's state: a refusal, silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.services.redis import free_port
from watchstep_launch.backend import (
    BackendDownError,
    CredentialsExpiredError,
    JobHandle,
    Launch,
)
from watchstep_launch.backends.ray.backend import Ray

JOB = JobHandle("ray", "some-job", {"started": 1})


class _Unwelcoming(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"Unauthorized: Missing authentication token")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        pass


@pytest.fixture
def unwelcoming() -> Iterator[str]:
    """Answers as a dashboard does that wants a token."""
    server = HTTPServer(("127.0.0.1", 0), _Unwelcoming)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_cluster_that_is_away_tells_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    away = Ray(address=f"http://127.0.0.1:{free_port()}")
    for call in (away.status, away.stop, away.kill, away.logs):
        with pytest.raises(BackendDownError, match="does not answer"):
            call(JOB)
    with pytest.raises(BackendDownError):
        away.submit(Launch(("true",), {}, tmp_path, name="never-taken"))


def test_a_cluster_that_wants_a_token(unwelcoming: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(CredentialsExpiredError, match="RAY_AUTH_TOKEN"):
        Ray(address=unwelcoming).status(JOB)
