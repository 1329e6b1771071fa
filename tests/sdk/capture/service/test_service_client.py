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
from tests.services.jobs import eventually
from watchstep import Bounds, CaptureConfig, Hook, StopTraining, open_run
from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.client import MOST_SEGMENTS, ServiceClient, ServicePause, store_in
from watchstep.capture.service.registration import Announcer
from watchstep.capture.stop import ControlReader
from watchstep.errors import ServiceError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.platform.transport import ServiceAddress, ServiceRefusedError, UnreachableError

QUICK = CaptureConfig(bounds=Bounds(flush_seconds=0.001))
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
    def announcements(self) -> list[Any]:
        """The bodies of all announcements."""
        return [body for path, body in self.requests if path.endswith("/announcements")]

    @property
    def announced(self) -> dict[int, bool]:
        """Steps that were announced, and whether as urgent."""
        return {
            segment["last"]: body["urgent"] for body in self.announcements for segment in body["segments"]
        }


def contact(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let hooks announce to a service."""
    monkeypatch.setenv("WATCHSTEP_SERVICE", url)
    monkeypatch.setenv("WATCHSTEP_TOKEN", "t")


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
    assert client.announce("r", [KEY], {}) == ControlDocument()
    assert client.pause_seconds == interval
    service.added.clear()
    client.announce("r", [KEY], {})
    assert client.pause_seconds == 0.0


def test_what_has_just_become_nan_is_announced_as_urgent(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contact(monkeypatch, service.address.url)
    with Hook(tmp_path, run="r", config=QUICK) as hook:
        for step, loss in enumerate((1.0, float("nan"))):
            hook.log(loss=loss)
            hook.step()
            hook.log(loss=loss)  # the step before is handed over
            eventually(lambda step=step: step in service.announced, 60)  # type: ignore[misc]
    assert (service.announced[0], service.announced[1]) == (False, True)


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
        ServiceClient(service.address, "vision").announce("r", [KEY], {})
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
    contact(monkeypatch, service.address.url)
    service.refuses = (status, "")
    began = time.monotonic()
    with Hook(tmp_path, run="r", config=QUICK) as hook:
        record_until(hook, lambda: len(list(tmp_path.rglob("*-*.arrow"))) >= 20)
        # Pauses of 1, 2, 4 … s lay between: so many requests fit into the time, however it went.
        fit = 2 + math.log2(1 + time.monotonic() - began)  # one more asked for the id of the store
        assert 1 <= len(service.requests) <= fit
        service.refuses, before = None, len(service.requests)
        record_until(hook, lambda: len(service.requests) > before + 1)
        assert service.announced, "it is registered, and goes on"
    assert hook.health["faults"]["service"]
    threads = [thread for thread in threading.enumerate() if thread.name == "watchstep-announcer"]
    assert not any(thread.is_alive() for thread in threads), "the last request has ended"


def test_no_segment_waits_for_a_slow_answer_and_all_are_announced_in_one_request(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 600.0)
    contact(monkeypatch, service.address.url)
    service.answering.clear()
    with Hook(tmp_path, run="r", config=QUICK) as hook:
        record_until(hook, lambda: len(segments_in(tmp_path)) >= 20)
        assert len(service.requests) == 2, "for the id of the store, and the registration"
        service.answering.set()
    written = {key.last for key in segments_in(tmp_path)}
    assert set(service.announced) == written
    assert len(service.announcements[1]["segments"]) > 10, "the first names what preceded the registration"
    assert len(service.announcements) < len(written)
    assert "skipped_announcements" not in hook.health["counts"]


def announcer(service: Listening, *, urgent: bool = False) -> Announcer:
    health = RecorderHealth()
    control = ControlReader(lambda _document, _attempt: None, health, 1.0)
    client = ServiceClient(service.address, "vision")
    return Announcer(client, {"run": "r", "rules": []}, control, health, lambda: urgent)


def keys_of(number: int, attempt: str = "a1") -> list[SegmentKey]:
    return [SegmentKey(WriterId(attempt, "node", "w0"), seq, 4 * seq, 4 * seq + 3) for seq in range(number)]


@pytest.mark.parametrize("urgent", [False, True])
def test_segments_of_an_interval_share_a_request_unless_they_are_urgent(
    service: Listening, monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    # Only an urgent segment is announced before the end.
    monkeypatch.setattr("watchstep.capture.service.registration._GATHER_SECONDS", 3600.0)
    announcing = announcer(service, urgent=urgent)
    first, second, third = keys_of(3)
    announcing.announce(first)
    if urgent:
        eventually(lambda: first.last in service.announced, 60)
    announcing.announce(second)
    announcing.announce(third)
    announcing.close(lambda: False)
    assert sorted(service.announced) == [3, 7, 11]
    assert len(service.announcements[0]["segments"]) == (1 if urgent else 3)


def test_it_is_stated_once_that_nothing_of_a_run_is_evaluated_and_once_that_it_is(
    service: Listening,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("watchstep.capture.service.registration._QUIET_SECONDS", 0.0)
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    for evaluated in (False, True):
        service.added["evaluated"] = evaluated
        announcing = announcer(service, urgent=True)
        for key in keys_of(3):
            announcing.announce(key)
        announcing.close(lambda: False)
        assert capsys.readouterr().err == (
            "watchstep: run r: the service evaluates it\n" if evaluated else ""
        )
    (warning,) = caplog.messages
    assert "the service has evaluated nothing of run r" in warning


def test_segments_of_two_attempts_have_separate_requests(service: Listening) -> None:
    announcing = announcer(service)
    service.answering.clear()
    for key in (*keys_of(2), *keys_of(2, "a2")):
        announcing.announce(key)
    service.answering.set()
    announcing.close(lambda: False)
    announced = {
        (body["attempt"], segment["seq"]) for body in service.announcements for segment in body["segments"]
    }
    assert announced == {("a1", 0), ("a1", 1), ("a2", 0), ("a2", 1)}


def test_the_oldest_of_too_many_segments_are_skipped(service: Listening) -> None:
    announcing = announcer(service)
    service.answering.clear()
    for key in keys_of(MOST_SEGMENTS + 300):
        announcing.announce(key)
    service.answering.set()
    announcing.close(lambda: False)
    assert max(service.announced) == keys_of(MOST_SEGMENTS + 300)[-1].last
    assert max(len(body["segments"]) for body in service.announcements) <= MOST_SEGMENTS


def test_a_service_that_never_answers_does_not_keep_a_hook_from_closing(
    service: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 600.0)
    contact(monkeypatch, service.address.url)
    service.answering.clear()
    bounds = Bounds(flush_seconds=0.001, close_seconds=0.5)
    with Hook(tmp_path, run="r", config=CaptureConfig(bounds=bounds)) as hook:
        hook.log(loss=1.0)
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.segments) == ("completed", 1)


def segments_in(root: Path) -> list[SegmentKey]:
    """The segments that a run of a folder has on the store."""
    folder = root / "default" / "r"
    return [
        SegmentKey.parse(path.relative_to(folder).as_posix())
        for path in (folder / "stats").rglob("*-*-*.*")
        if path.is_file() and path.suffix in {".arrow", ".parquet"}
    ]


def test_a_service_that_hangs_delays_the_end_by_a_second_and_not_by_its_timeout(
    service: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 0.01)
    service.answering.clear()
    announcing = announcer(service)
    (key,) = keys_of(1)
    announcing.announce(key)
    eventually(lambda: announcing.is_paused, 60)
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 600.0)
    announcing.hurry()
    announcing.close(lambda: False)  # would wait for ten minutes
    service.answering.set()


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
        ServiceClient(service.address, "vision").announce("r", [KEY], {})


@pytest.mark.parametrize("part", ["body", "line"])
def test_a_service_whose_answer_never_ends_holds_up_neither_rows_nor_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._TIMEOUT_SECONDS", 0.5)
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    with dripping(part) as url:
        contact(monkeypatch, url)
        config = CaptureConfig(bounds=Bounds(flush_seconds=0.001, control_seconds=0.001))
        with Hook(tmp_path, run="r", on_stop="raise", config=config) as hook:
            record_until(hook, lambda: len(list(tmp_path.rglob("*-*.arrow"))) >= 20)
            record_until(hook, lambda: "service" in hook.health["faults"])
            stopped = ControlDocument().with_stop(StopRequest("a1", 3, "by test"))
            (tmp_path / "default" / "r" / "control.json").write_bytes(stopped.encode())
            with pytest.raises(StopTraining, match="by test"):
                record_until(hook, lambda: False)


def test_an_answer_names_a_store_by_a_path_that_can_be_looked_up() -> None:
    identity = "0" * 32
    assert store_in({"store": "/runs", "store_id": identity}) == ("/runs", identity)
    for answer in ({"store": "/a" * 5000, "store_id": identity}, {"store": "/runs", "store_id": "1"}, {}):
        assert store_in(answer) is None
