"""Turns of runs, of archived projects and of backtests."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.services.driving import RULES, Driven
from tests.services.jobs import eventually
from tests.services.redis import Broker, free_port, running_redis
from watchstep import Hook, open_run
from watchstep.capture.config import Bounds, CaptureConfig
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.evaluation.backtests import request_backtest
from watchstep_services.runs.registration import register
from watchstep_services.scheduler import queue
from watchstep_services.scheduler.celery_client import EVALUATE, QUEUE, URGENT, make_celery, queue_of
from watchstep_services.scheduler.production import CeleryNotifier
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.turns import is_full, note_awake, request_wake, take_turn
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.service.context import Service

CONFIG = CaptureConfig(
    collections={"losses": CaptureConfig().chosen["losses"]}, system=None, bounds=Bounds(close_seconds=60)
)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_redis() as server:
        yield server


def test_what_piled_up_is_passed_over(broker: Broker) -> None:
    celery = make_celery(load_settings(broker_url=broker.url))
    assert [take_turn(celery, "sweep", 3600.0) for _ in range(3)] == [True, False, False]
    assert take_turn(celery, "upkeep", 3600.0)
    assert 0 < broker.client.pttl("watchstep-turn:sweep") <= 1_800_000
    broker.client.flushall()
    assert take_turn(celery, "sweep", 3600.0)
    celery.close()


def test_without_the_broker_it_is_done_and_nobody_sleeps_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)  # between the tries to connect
    celery = make_celery(load_settings(broker_url=f"redis://127.0.0.1:{free_port()}/0"))
    assert take_turn(celery, "sweep", 3600.0)
    assert not is_full(celery, QUEUE)
    assert not any(slept)
    celery.close()


def test_a_broker_that_takes_connections_and_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        celery = make_celery(load_settings(broker_url=f"redis://127.0.0.1:{silent.getsockname()[1]}/0"))
        assert take_turn(celery, "sweep", 3600.0)
        assert not is_full(celery, QUEUE)
        assert request_wake(celery, QUEUE)
        celery.close()


@pytest.mark.ci
def test_a_broker_that_was_started_again_is_asked_again() -> None:
    with running_redis() as first:
        celery = make_celery(load_settings(broker_url=first.url))
        assert [take_turn(celery, "sweep", 3600.0) for _ in range(2)] == [True, False]
        port = int(first.url.rsplit(":", 1)[1].partition("/")[0])
    assert [take_turn(celery, "sweep", 3600.0) for _ in range(2)] == [True, True]
    with running_redis(port):
        assert [take_turn(celery, "sweep", 3600.0) for _ in range(2)] == [True, False]
    celery.close()


def test_where_many_messages_wait_no_more_are_wanted(broker: Broker) -> None:
    celery = make_celery(load_settings(broker_url=broker.url))
    broker.client.flushall()
    for number in range(150):
        assert is_full(celery, QUEUE) is (number >= 100)
        celery.send_task(EVALUATE, args=[number])
    celery.close()


def test_an_action_does_not_wait_behind_evaluations(broker: Broker) -> None:
    celery = make_celery(load_settings(broker_url=broker.url))
    broker.client.flushall()
    notifier = CeleryNotifier(celery)
    notifier.run_changed(1)
    notifier.action_due(7)
    eventually(lambda: broker.client.llen(URGENT) == 1)
    assert broker.client.llen(QUEUE) == 1
    celery.close()


def test_a_queue_has_one_message_that_wakes_its_workers(broker: Broker) -> None:
    celery = make_celery(load_settings(broker_url=broker.url))
    broker.client.flushall()
    notifier = CeleryNotifier(celery)
    for run_id in range(5):
        notifier.run_changed(run_id, "w1")
        notifier.run_changed(run_id)
    notifier.action_due(7)
    eventually(lambda: broker.client.llen(URGENT) == 1)  # hints are sent in order
    assert (broker.client.llen(queue_of("w1")), broker.client.llen(QUEUE)) == (1, 1)
    # What is announced after a worker has begun to look for work needs another message.
    note_awake(celery, queue_of("w1"))
    notifier.run_changed(9, "w1")
    notifier.run_changed(9)
    notifier.action_due(8)
    eventually(lambda: broker.client.llen(URGENT) == 2)
    assert (broker.client.llen(queue_of("w1")), broker.client.llen(QUEUE)) == (2, 1)
    celery.close()


def test_a_wake_up_that_was_lost_is_repeated(broker: Broker) -> None:
    celery = make_celery(load_settings(broker_url=broker.url))
    broker.client.flushall()
    assert [request_wake(celery, QUEUE) for _ in range(2)] == [True, False]
    assert 0 < broker.client.pttl(f"watchstep-wake:{QUEUE}") <= 5000
    broker.client.flushall()
    assert request_wake(celery, QUEUE)
    celery.close()


def test_no_clock_of_a_worker_decides_what_is_too_old() -> None:
    schedule = make_celery(load_settings()).conf.beat_schedule
    assert not any("expires" in entry.get("options", {}) for entry in schedule.values())


def test_a_project_with_many_backtests_delays_that_of_another_by_one_run(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = driven_sqlite.service
    for project in ("many", "other"):
        register(service, project, "run-1", (), "operator")
    judged: list[int] = []
    release, begun, done = threading.Event(), threading.Event(), threading.Event()
    turns = 8

    def judge(_service: Service, number: int) -> None:
        begun.set()
        assert release.wait(60)
        judged.append(number)
        if len(judged) == turns:
            done.set()

    monkeypatch.setitem(queue._WORK, "backtest", judge)
    work = WorkQueue(1)
    work.start(service)
    asking = replace(service, notifier=work)
    try:
        many = [request_backtest(asking, "many", ["run-1"], RULES, []) for _ in range(turns - 1)]
        assert begun.wait(60)
        other = request_backtest(asking, "other", ["run-1"], RULES, [])
        release.set()
        assert done.wait(60)
    finally:
        release.set()
        work.close()
    assert judged[:2] == [many[0], other]


def test_the_recorder_takes_the_refusal_for_a_fault_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(tmp_path / "store"))) as service:
        headers = {"authorization": f"Bearer {create_token(service.database, 'admin')}"}
        monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)

        def change(body: dict[str, object]) -> None:
            answer = httpx.patch(f"{service.url}/v1/projects/p", json=body, headers=headers, timeout=60)
            assert answer.is_success, answer.text

        run = {"run": "r"}
        made = httpx.post(f"{service.url}/v1/projects/p/runs", json=run, headers=headers, timeout=60)
        assert made.is_success, made.text
        change({"archived": True})
        with (
            caplog.at_level(logging.WARNING),
            Hook(tmp_path / "store", project="p", run="r", config=CONFIG) as hook,
        ):
            for loss in (1.0, 0.5):
                hook.log(loss=loss)
                hook.step()
        faults = hook.health["faults"]
        assert list(faults) == ["service"]
        assert "project 'p': archived" in faults["service"]
        assert sum("watchstep: service:" in line for line in caplog.messages) == 1
    assert open_run(tmp_path / "store" / "p" / "r").steps() == [0, 1]
    assert json.loads((tmp_path / "store" / "p" / "r" / "run.json").read_bytes())["run"] == "r"
