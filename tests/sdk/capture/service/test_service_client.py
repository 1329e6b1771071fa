"""What a recorder announces to the service, and what answers change in a recorder: only the announcement interval."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.store.dripping_server import dripping
from watchstep import Bounds, CaptureConfig, Hook, StopTraining, open_run
from watchstep.capture.service.client import ServiceClient, ServicePause
from watchstep.errors import ServiceError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.platform.transport import ServiceAddress, ServiceRefusedError, UnreachableError

KEY = SegmentKey(WriterId("a1", "node", "w0"), 0, 0, 3)


@dataclass
class Listening:
    """A service that only listens.

    Attributes:
        address: where it is.
        added: what it adds to its next answers.
        refuses: status and Retry-After of its next answers; None if it accepts requests.
        answers: its next answers; None for those of a service.
        answering: set while it answers; else its answers wait.
        requests: path and body of each request.
    """

    address: ServiceAddress
    added: dict[str, Any] = field(default_factory=dict)
    refuses: tuple[int, str] | None = None
    answers: bytes | None = None
    answering: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def announced(self) -> dict[int, bool]:
        """Steps that were announced, and whether as urgent."""
        return {
            body["last"]: body["urgent"] for path, body in self.requests if path.endswith("/announcements")
        }


@pytest.fixture
def service() -> Iterator[Listening]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            listening.requests.append((self.path, message))
            listening.answering.wait(60)
            body = json.dumps({"control": ControlDocument().as_data(), **listening.added}).encode()
            status, after = listening.refuses or (200, "")
            body = body if listening.answers is None else listening.answers
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if after:
                self.send_header("retry-after", after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        listening = Listening(ServiceAddress.checked(f"http://127.0.0.1:{server.server_address[1]}", "t"))
        listening.answering.set()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield listening
        listening.answering.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "interval"),
    [
        (2.5, 2.5),
        (0, 0.0),
        (1e9, 30.0),
        (-1, 0.0),
        ("7", 0.0),
        (None, 0.0),
        (True, 0.0),
        (float("nan"), 0.0),
        (10**400, 30.0),
    ],
)
def test_a_service_that_lags_requests_a_pause(service: Listening, answer: object, interval: float) -> None:
    client = ServiceClient(service.address, "vision")
    assert client.pause_seconds == 0.0
    service.added["pause_seconds"] = answer
    assert client.announce("r", KEY, {}) == ControlDocument()
    assert client.pause_seconds == interval
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


@pytest.mark.parametrize(
    ("refuses", "after"),
    [
        ((401, ""), None),
        ((429, "7"), 7.0),
        ((503, "3"), 3.0),
        ((429, "Fri, 20 Nov 2020 00:00:00 GMT"), 0.0),
        ((429, "soon"), None),
    ],
)
def test_a_refusal_states_when_to_retry(
    service: Listening, refuses: tuple[int, str], after: float | None
) -> None:
    service.refuses = refuses
    with pytest.raises(ServiceRefusedError) as refusal:
        ServiceClient(service.address, "vision").announce("r", KEY, {})
    assert (refusal.value.status, refusal.value.after_seconds) == (refuses[0], after)


def test_the_pause_after_a_refusal() -> None:
    now = [0.0]
    pause = ServicePause(lambda: now[0], lambda: 0.0)

    def refused(status: int, after: float | None) -> None:
        pause.failed(ServiceRefusedError(status, "", "no", "", after))

    def lasts() -> float:
        """Seconds until the next request to the service."""
        began = now[0]
        while pause.is_active:
            now[0] += 0.5
        return now[0] - began

    assert lasts() == 0
    for expected in (1, 2, 4, 8, 16, 30, 30):
        refused(401, None)
        assert lasts() == expected
    pause.answered()
    refused(429, 7.0)
    assert lasts() == 7
    refused(429, 1e9)
    assert lasts() == 300
    pause.answered()
    pause.failed(ServiceRefusedError(422, "", "no", "", None), repeats=False)
    assert lasts() == 0, "the next request may be accepted"
    for status, expected in ((500, 1), (404, 2), (302, 4)):
        refused(status, None)
        assert lasts() == expected, "the same request is sent again"
    pause.answered()
    for error in (
        UnreachableError("no answer", ""),
        ServiceRefusedError(503, "", "starts", ""),
        ServiceError("something else", ""),
    ):
        pause.failed(error)
        assert lasts() == 1, "a service that starts, or none of Watchstep's"
        pause.answered()
    refused(503, 3.0)
    assert pause.is_active
    pause.hurry()
    assert not pause.is_active


@pytest.mark.parametrize("status", [401, 500, 404, 302])
def test_a_service_that_refuses_is_ignored_while_a_loss_is_nan(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("WATCHSTEP_SERVICE", service.address.url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    service.refuses = (status, "")
    began = time.monotonic()
    with Hook(tmp_path, run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=0.001))) as hook:
        record_until(hook, lambda: len(list(tmp_path.rglob("*-*.parquet"))) >= 20)
        # Pauses of 1, 2, 4 … s lay between: so many requests fit into the time, however it went.
        fit = 1 + math.log2(1 + time.monotonic() - began)
        assert 1 <= len(service.requests) <= fit
        service.refuses, before = None, len(service.requests)
        record_until(hook, lambda: len(service.requests) > before + 1)
        assert service.announced, "it is registered, and goes on"


def test_no_segment_waits_for_a_slow_answer(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 600.0)
    monkeypatch.setattr("watchstep.capture.service.registration._SLOW_SECONDS", 0.0)
    monkeypatch.setenv("WATCHSTEP_SERVICE", service.address.url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    service.answering.clear()
    with Hook(tmp_path, run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=0.001))) as hook:
        record_until(hook, lambda: len(list(tmp_path.rglob("*-*.parquet"))) >= 20)
        assert len(service.requests) == 1, "the registration"
        service.answering.set()
    written = sorted(
        SegmentKey.parse(f"stats/{path.relative_to(tmp_path / 'default/r/stats')}").last
        for path in tmp_path.rglob("*-*.parquet")
    )
    assert max(service.announced) == written[-1], "the last is announced before the hook is closed"
    assert len(service.announced) < len(written), "of those that waited only the newest"
    assert hook.health["counts"]["skipped_announcements"] > 0


def test_a_service_that_never_answers_does_not_keep_a_hook_from_closing(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 600.0)
    monkeypatch.setenv("WATCHSTEP_SERVICE", service.address.url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
    service.answering.clear()
    bounds = Bounds(flush_seconds=0.001, close_seconds=0.5)
    with Hook(tmp_path, run="r", config=CaptureConfig(bounds=bounds)) as hook:
        hook.log(loss=1.0)
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.segments) == ("completed", 1)


def record_until(hook: Hook, done: Callable[[], object]) -> None:
    """Record steps whose loss is not a number."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        hook.log(loss=float("nan"))
        hook.step()
        time.sleep(0.01)  # the pace of a training


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (b'{"status":"ok"}', "no control document"),
        (b'{"control":null}', "no control document"),
        (b'{"control":7}', "no control document"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b"[" + b"[]," * 600_000 + b"[]]", "not valid JSON"),
    ],
)
def test_an_answer_of_another_form_is_an_error_of_the_service(
    service: Listening, answers: bytes, reason: str
) -> None:
    service.answers = answers
    with pytest.raises(ServiceError, match=reason):
        ServiceClient(service.address, "vision").announce("r", KEY, {})


@pytest.mark.parametrize("part", ["body", "line"])
def test_a_service_whose_answer_never_ends_holds_up_neither_rows_nor_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    with dripping(part) as url:
        monkeypatch.setenv("WATCHSTEP_SERVICE", url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", "t")
        config = CaptureConfig(bounds=Bounds(flush_seconds=0.001, control_seconds=0.001))
        with Hook(tmp_path, run="r", on_stop="raise", config=config) as hook:
            record_until(hook, lambda: len(list(tmp_path.rglob("*-*.parquet"))) >= 20)
            record_until(hook, lambda: "service" in hook.health["faults"])
            stopped = ControlDocument().with_stop(StopRequest("a1", 3, "by test"))
            (tmp_path / "default" / "r" / "control.json").write_bytes(stopped.encode())
            with pytest.raises(StopTraining, match="by test"):
                record_until(hook, lambda: False)
