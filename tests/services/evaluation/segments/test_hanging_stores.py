"""A store that does not answer: its runs are postponed, and hold no worker, until it answers again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.sdk.store.faulty_s3 import FaultyS3
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording
from watchstep.errors import NotFoundError, StoreError
from watchstep.store.store import Store
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.engine import Database
from watchstep_services.stores import bulkhead
from watchstep_services.stores.bulkhead import HangingStores

BUCKET = StoreRegistration("s3://bucket/runs")
NO_ANSWER = StoreError("store s3://bucket/runs: no answer", "see whether it can be reached")
MISSING = NotFoundError("object run.json: not there", "check its name")


@pytest.fixture(autouse=True)
def _any_wait_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulkhead, "_HANGS_SECONDS", 0.0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    with FaultyS3().serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def hang(stores: HangingStores, store: StoreRegistration, error: StoreError) -> None:
    with pytest.raises(StoreError), stores.noted(store):
        raise error


def test_runs_of_a_store_that_hangs_are_postponed_until_it_answers(sqlite: Database, s3: FaultyS3) -> None:
    store = Store.open("s3://bucket/runs")
    driven = Driven(make_service(sqlite, store))
    recording, run_id = Recording(store).begin(), driven.register()
    recording.write_all([1, 3])
    driven.announce(run_id, *recording.written["w0"])
    s3.fault = "denied"
    with pytest.raises(StoreError):
        driven.evaluate(run_id)
    s3.fault = "stall"
    assert driven.evaluate(run_id).outcome == "idle"
    assert s3.met.wait(60)
    assert driven.evaluate(run_id).outcome == "idle"  # and does not wait for the probe
    s3.fault = "none"
    s3.released.set()
    driven.service.hanging_stores.close()
    assert driven.evaluate(run_id).outcome == "committed"
    assert driven.run(run_id).last_step == 3


def test_one_probe_at_a_time_and_none_for_other_stores() -> None:
    stores, asked, answer = HangingStores(), [], threading.Event()

    def probe() -> None:
        asked.append(1)
        answer.wait(60)

    hang(stores, BUCKET, NO_ANSWER)
    assert stores.answers(StoreRegistration("s3://other/runs"), probe)
    assert not stores.answers(BUCKET, probe)
    assert not stores.answers(BUCKET, probe)
    answer.set()
    stores.close()
    assert stores.answers(BUCKET, probe)
    assert asked == [1]


def test_an_object_that_is_not_there_is_an_answer() -> None:
    stores = HangingStores()

    def probe() -> None:
        raise MISSING

    hang(stores, BUCKET, NO_ANSWER)
    assert not stores.answers(BUCKET, probe)
    stores.close()
    assert stores.answers(BUCKET, probe)


def test_a_probe_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = HangingStores()
    monkeypatch.setattr(bulkhead, "_HANGS_SECONDS", -1.0)

    def fails() -> None:
        raise NO_ANSWER

    hang(stores, BUCKET, NO_ANSWER)
    for _ in range(3):
        assert not stores.answers(BUCKET, fails)
        stores.close()
    assert not stores.answers(BUCKET, list)
    stores.close()
    assert stores.answers(BUCKET, fails)


def test_a_probe_that_is_refused_at_once_leaves_the_reason_to_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = HangingStores()

    def refused() -> None:
        raise NO_ANSWER

    hang(stores, BUCKET, NO_ANSWER)
    monkeypatch.setattr(bulkhead, "_HANGS_SECONDS", 60.0)
    assert not stores.answers(BUCKET, refused)
    stores.close()
    assert stores.answers(BUCKET, refused)


def test_a_probe_that_cannot_begin_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = HangingStores()
    hang(stores, BUCKET, NO_ANSWER)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert not stores.answers(BUCKET, list)
        stores.close()
    assert not stores.answers(BUCKET, list)
    stores.close()
    assert stores.answers(BUCKET, list)


def test_runs_come_again_the_later_the_longer_their_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = HangingStores()
    assert stores.retry_seconds(BUCKET) == 2.0
    hang(stores, BUCKET, NO_ANSWER)
    now = bulkhead._now()
    seconds = []
    for hung in (0, 30, 1000):
        monkeypatch.setattr(bulkhead, "_now", lambda hung=hung: now + hung)
        seconds.append(round(stores.retry_seconds(BUCKET)))
    assert seconds == [2, 6, 20]


@pytest.mark.parametrize(
    ("store", "error"),
    [(StoreRegistration("/srv/runs"), NO_ANSWER), (BUCKET, MISSING)],
    ids=["folder", "not found"],
)
def test_folders_and_missing_objects_do_not_make_a_store_hang(
    store: StoreRegistration, error: StoreError
) -> None:
    stores = HangingStores()
    hang(stores, store, error)
    assert stores.answers(store, list)


def test_a_store_that_refuses_at_once_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulkhead, "_HANGS_SECONDS", 60.0)
    stores = HangingStores()
    hang(stores, BUCKET, NO_ANSWER)
    assert stores.answers(BUCKET, list)
