"""A store that accepts connections and says nothing holds a sweep up for a moment, and once; its runs are told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.services.driving import Driven
from tests.services.scheduler.test_polling import set_run
from watchstep.errors import StoreError
from watchstep.store import cloud
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.core.telemetry import metrics
from watchstep_services.runs.registration import register
from watchstep_services.scheduler.polling import poll_due_runs
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.stores.bulkhead import Bulkhead
from watchstep_services.tenancy import create_project, register_store

BUCKET = StoreRegistration("s3://bucket/runs")
OTHER = StoreRegistration("s3://other/runs")


class Hanging(ThreadingHTTPServer):
    """Answers nobody until it is released; then it refuses everything."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), _Refusing)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Refusing(BaseHTTPRequestHandler):
    server: Hanging

    def do_GET(self) -> None:
        self.server.asked.set()
        self.server.released.wait(120)
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """A client's own timeouts are so long here that a sweep which waited for it would not come back."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud, "_REQUEST_TIMEOUT", timedelta(seconds=600))
    server = Hanging()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def with_hanging_project(driven: Driven, server: Hanging) -> tuple[Driven, int]:
    """A service of which one project lies on that server, with a run."""
    quick = driven.with_settings(store_wait_seconds=0.1)
    with quick.service.database.write() as session:
        store = register_store(
            session, "hung", StoreRegistration("s3://bucket/runs", region="us-east-1", endpoint=server.url)
        )
        create_project(session, "a-hung", store)
    return quick, register(quick.service, "a-hung", "run-1", (), "recorder")


def faults() -> float:
    return metrics.REGISTRY.get_sample_value("watchstep_sweep_faults_total", {"of": "store"}) or 0.0


def test_looks_at_other_projects_runs_do_not_wait_for_it(driven: Driven, hanging: Hanging) -> None:
    quick, hung = with_hanging_project(driven, hanging)
    good = quick.register()
    before = faults()
    poll_due_runs(quick.service, 1e9)
    assert hanging.asked.wait(60)
    assert quick.run(good).listed_ns
    assert not quick.run(hung).listed_ns
    assert faults() == before + 1
    for run_id in (hung, good):
        set_run(quick, run_id, poll_ns=0, listed_ns=0)
    poll_due_runs(quick.service, 1e9)
    assert quick.run(good).listed_ns
    assert faults() == before + 1, "it is told once, and not waited for again"
    hanging.released.set()
    quick.service.bulkhead.close()
    assert "store" in quick.run(hung).health, "the look went on, and told its end"


def test_a_sweep_finds_and_hands_out_what_others_need(
    driven_sqlite: Driven, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    quick, hung = with_hanging_project(driven_sqlite, hanging)
    good = quick.register()
    set_run(quick, good, due_ns=1)
    assert sweep(quick.service).runs == (good,)
    assert quick.run(good).listed_ns
    assert hanging.asked.wait(60)
    assert "other stores are used meanwhile" in caplog.text
    hanging.released.set()
    quick.service.bulkhead.close()
    set_run(quick, hung, poll_ns=0)
    poll_due_runs(quick.with_settings(store_wait_seconds=60.0).service, 1e9)
    quick.service.bulkhead.close()
    assert "store" in quick.run(hung).health


def test_work_is_awaited_and_its_errors_are_raised_where_it_was_asked_for() -> None:
    bulkhead = Bulkhead()

    def fails() -> None:
        raise StoreError("bucket: refused", "look at it")

    assert bulkhead.call(BUCKET, lambda: 7, 60, None) == 7
    with pytest.raises(StoreError):
        bulkhead.call(BUCKET, fails, 60, None)
    assert bulkhead.call(BUCKET, lambda: 8, 60, None) == 8


def test_a_store_is_asked_one_thing_at_a_time_and_waited_for_again_once_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bulkhead, release = Bulkhead(), threading.Event()

    def hangs() -> str:
        release.wait(120)
        raise StoreError("bucket: gone", "look at it")

    assert bulkhead.call(BUCKET, hangs, 0.05, "later") == "later"
    assert bulkhead.call(BUCKET, lambda: "asked", 60, "busy") == "busy"
    assert bulkhead.call(OTHER, lambda: "other", 60, "busy") == "other"
    release.set()
    bulkhead.close()
    assert "failed after its caller had left" in caplog.text
    done = threading.Event()
    bulkhead.call(BUCKET, done.set, 60, None)  # nobody need wait for this one, and it is quick
    bulkhead.close()
    assert done.is_set()
    assert bulkhead.call(BUCKET, lambda: "again", 60, "busy") == "again"


def test_urgent_work_waits_for_no_other_and_is_not_begun_where_much_of_it_hangs() -> None:
    bulkhead, release = Bulkhead(), threading.Event()
    assert bulkhead.call(BUCKET, lambda: release.wait(120), 0.05, "later") == "later"
    assert bulkhead.call_urgent(BUCKET, lambda: 7, 60) == 7
    for _ in range(8):
        with pytest.raises(StoreError, match="no answer for"):
            bulkhead.call_urgent(BUCKET, lambda: release.wait(120), 0.01)
    with pytest.raises(StoreError, match="not answered for a while"):
        bulkhead.call_urgent(BUCKET, lambda: 7, 60)
    assert bulkhead.call_urgent(OTHER, lambda: 7, 60) == 7
    release.set()
    bulkhead.close()
    assert bulkhead.call_urgent(BUCKET, lambda: 7, 60) == 7


def test_a_folder_is_asked_at_once() -> None:
    asked_in = Bulkhead().call(StoreRegistration("/tmp/runs"), threading.current_thread, 0.0, None)
    assert asked_in is threading.current_thread()
    assert Bulkhead().call_urgent(StoreRegistration("/tmp/runs"), threading.current_thread, 0.0) is asked_in
