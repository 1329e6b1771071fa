"""Production as docker-compose runs it: API, Celery worker and beat as processes, PostgreSQL, Redis, S3."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import S3
from tests.end_to_end.production import CLIENT, RUN, Production, producing
from tests.services.channels.http_server import HttpServer, http_server, status
from tests.services.core.collector import ANNOUNCEMENT, Collector, collecting
from tests.services.jobs import STUBBORN, eventually, launch
from tests.services.postgres import Postgres, running_postgres
from tests.services.recording import PROJECT, Recording, damage_from, nan_from
from tests.services.redis import Broker, running_redis
from watchstep.format.control import ControlDocument
from watchstep.store.store import Store
from watchstep_launch.backends.local.backend import Local

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_redis() as server:
        yield server


@pytest.fixture
def receiver() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def production(
    s3: S3, postgres: Postgres, broker: Broker, collector: Collector, tmp_path: Path
) -> Iterator[Production]:
    with producing(s3, postgres, broker, collector, tmp_path) as made:
        yield made


def sample(figures: str, name: str) -> float:
    """The value of one line of what Prometheus reads."""
    (line,) = [line for line in figures.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def check_one_trace(production: Production) -> None:
    """From the announcement to the stop, over three processes."""
    stops = production.collector.named("watchstep.stop")
    (stopped,) = [span for span in stops if span.attributes["watchstep.outcome"] == "done"]
    evaluated = [s for s in production.collector.named("watchstep.evaluate") if s.span == stopped.parent]
    announced = [s for s in production.collector.named(ANNOUNCEMENT) if s.span == evaluated[0].parent]
    assert {span.trace for span in (*evaluated, *announced)} == {stopped.trace}
    assert {span.kind for span in announced} == {"server"}
    assert (announced[0].service, stopped.service) == ("watchstep-api", "watchstep-worker")
    assert announced[0].parent  # the recorder's


def check_figures(production: Production) -> None:
    """Those of the API, of its port, and of a worker's processes together."""
    headers = {"authorization": f"Bearer {production.operator}"}
    of_api = CLIENT.get(f"{production.url}/metrics", headers=headers).text
    assert CLIENT.get(f"{production.url}/metrics").status_code == 401
    assert sample(of_api, 'watchstep_announcements_total{result="fresh"}') == 2
    assert sample(of_api, "watchstep_database_up") == 1
    of_worker = CLIENT.get(production.worker_figures).text
    assert sample(of_worker, 'watchstep_evaluations_total{outcome="committed"}') >= 1
    assert sample(of_worker, 'watchstep_action_tries_total{kind="stop",outcome="done"}') == 1
    assert sample(of_worker, "watchstep_evaluation_lag_seconds_count") == 2


def check_logs(production: Production) -> None:
    """Every line of every process is JSON; those of a run name it."""
    for name in ("api", "worker", "scheduler"):
        for line in (production.folder / f"{name}.log").read_text().splitlines():
            assert {"time", "level", "logger", "message"} <= json.loads(line).keys()


def test_a_nan_is_announced_judged_told_and_stopped(
    production: Production, receiver: HttpServer, tmp_path: Path
) -> None:
    backend = Local()
    job = launch(backend, tmp_path, STUBBORN)
    recording = Recording(Store.open(production.environment["WATCHSTEP_STORE"])).begin(on_stop="raise")
    with production.api(), production.workers():
        bound = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
        production.client(production.operator).register({"run": "run-1", "attempt": "a1", "job": bound})
        told = {"rule": "non_finite_values", "name": "told", "actions": [{"webhook": receiver.url}]}
        recorder = production.client(production.recorder)
        recorder.register({"run": "run-1", "attempt": "a1", "rules": [told]})
        receiver.answers = [status(500)]
        assert recorder.announce("run-1", [recording.write(0, 0, 3)], {}) == ControlDocument()
        recorder.announce("run-1", [recording.write(1, 4, 7, damage_from(6))], {"dropped": 0})
        eventually(lambda: "run.ended" in production.event_types(), 120)
        eventually(lambda: len(receiver.events) == 2, 120)

        assert backend.status(job).exit_code == -signal.SIGKILL
        assert production.get(RUN)["state"] == "stopped"
        assert production.event_types().count("stop.requested") == 1
        assert {event["id"] for event in receiver.events} == {receiver.events[0]["id"]}
        assert receiver.events[0]["data"]["finding"]["step"] == 6
        control = ControlDocument.decode(recording.store.get("control.json"))
        assert control.stop is not None
        assert control.stop.step == 8
        actions = {action["kind"]: action for action in production.get(f"{RUN}/actions")["actions"]}
        eventually(
            lambda: {action["state"] for action in production.get(f"{RUN}/actions")["actions"]} == {"done"}
        )
        assert len(actions) == 2
        check_figures(production)
    check_one_trace(production)
    check_logs(production)


def test_a_broker_that_forgets_costs_no_event(production: Production) -> None:
    recording = Recording(Store.open(production.environment["WATCHSTEP_STORE"])).begin()
    with production.api():
        recorder = production.client(production.recorder)
        recorder.register({"run": "run-1", "attempt": "a1"})
        recorder.announce("run-1", [recording.write(0, 0, 3, damage_from(2))], {})
        production.broker.client.flushall()
        recording.write(1, 4, 7, damage_from(2))  # and this one nobody announced
        with production.workers():
            eventually(lambda: "alert.firing" in production.event_types(), 120)
            eventually(lambda: production.get(RUN)["last_step"] == 7, 120)


def test_health_checks_tell_running_parts_from_missing_ones(production: Production) -> None:
    parts = ("api", "worker", "scheduler")
    assert not any(map(production.is_healthy, parts))
    with production.api(), production.workers():
        for name in parts:
            eventually(functools.partial(production.is_healthy, name), 120)
        for written in production.folder.glob("beat-schedule*"):
            os.utime(written, (0, 0))
        assert not production.is_healthy("scheduler")


def test_a_backtest_is_judged_by_a_worker(production: Production) -> None:
    recording = Recording(Store.open(production.environment["WATCHSTEP_STORE"])).begin()
    recording.write_all([3, 7], nan_from(6))
    place = f"/v1/projects/{PROJECT}/backtests"
    with production.api():
        production.client(production.recorder).register({"run": "run-1", "attempt": "a1"})
        body = {"runs": ["run-*"], "rules": [{"rule": "non_finite_values"}], "sweep": ["max_elements=0,1"]}
        headers = {"authorization": f"Bearer {production.operator}"}
        asked = CLIENT.post(production.url + place, json=body, headers=headers)
        assert asked.status_code == 202, asked.text
        number = asked.json()["id"]
        production.broker.client.flushall()  # the sweep finds it
        with production.workers():
            eventually(lambda: production.get(f"{place}/{number}")["state"] == "done", 120)
        report = production.get(f"{place}/{number}")["report"]
    (run,) = report["runs"]
    assert run["location"] == "s3://runs/some/prefix/vision/run-1"
    (rule,) = run["attempts"][0]["rules"]
    assert [change["step"] for change in rule["transitions"]] == [6]
    assert [len(one["fired"]) for one in report["sweep"]] == [1, 0]
