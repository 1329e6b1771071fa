"""Production as docker-compose runs it: API, Celery worker and beat as processes, PostgreSQL, Redis, S3."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import S3
from tests.infra.compose import command_of, health_of, search_path
from tests.services.collector import Collector, collecting
from tests.services.dispatcher.receiver import Receiver, receiving
from tests.services.jobs import STUBBORN, eventually, launch
from tests.services.postgres import Postgres, running_postgres
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.redis import Broker, free_port, running_redis
from watchstep.capture.service_client import ServiceAddress, ServiceClient
from watchstep.control import ControlDocument
from watchstep.store import Store
from watchstep_services.database.engine import open_database
from watchstep_services.estimator.local import Local
from watchstep_services.tokens import create_token

pytestmark = pytest.mark.slow

CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
RUN = f"/v1/projects/{PROJECT}/runs/run-1"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_redis() as server:
        yield server


@dataclass(frozen=True)
class Production:
    """Where production runs, and how to start and stop its parts."""

    environment: dict[str, str]
    folder: Path
    url: str
    operator: str
    recorder: str
    broker: Broker
    collector: Collector
    worker_figures: str

    @contextmanager
    def process(self, name: str, *command: str, figures: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """One part as a process of its own; it must end by SIGTERM."""
        environment = {**self.environment}
        if figures:
            environment["WATCHSTEP_METRICS_PORT"] = str(urlsplit(figures).port)
        with (self.folder / f"{name}.log").open("ab") as log:
            running = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
                raise
            sys.stdout.write((self.folder / f"{name}.log").read_text())

    @contextmanager
    def api(self) -> Iterator[None]:
        """The API, once it is ready."""
        here = ["--host", "127.0.0.1", "--port", self.port]  # the last word of each counts
        with self.process("api", *command_of("api"), *here) as running:
            eventually(lambda: self.is_ready() or running.poll() is not None, 120)
            assert running.poll() is None
            yield

    @contextmanager
    def workers(self) -> Iterator[None]:
        """A Celery worker with two processes, and beat."""
        with (
            self.process("worker", *command_of("worker"), figures=self.worker_figures),
            self.process("scheduler", *command_of("scheduler")),
        ):
            yield

    def is_healthy(self, name: str) -> bool:
        """What docker-compose would say of a part."""
        command = [word.replace(":8642/", f":{self.port}/") for word in health_of(name)]
        environment = {**self.environment, "HOSTNAME": socket.gethostname()}
        return not subprocess.run(command, env=environment, cwd=self.folder, check=False).returncode

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def is_ready(self) -> bool:
        try:
            return CLIENT.get(f"{self.url}/readyz").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        answer = CLIENT.get(self.url + path, headers={"authorization": f"Bearer {self.operator}"})
        assert answer.is_success, answer.text
        return answer.json()

    def event_types(self) -> list[str]:
        events = self.get(f"{RUN}/events")["events"]
        return [event["type"].removeprefix("watchstep.") for event in events]

    def client(self, token: str) -> ServiceClient:
        return ServiceClient(ServiceAddress.checked(self.url, token), PROJECT)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def production(
    s3: S3, postgres: Postgres, broker: Broker, collector: Collector, tmp_path: Path
) -> Iterator[Production]:
    from watchstep_services.database.schema import upgrade

    s3.make_bucket("runs")
    broker.client.flushall()
    port = free_port()
    with postgres.new_database() as database_url, ExitStack() as stack:
        database = open_database(database_url)
        stack.callback(database.close)
        upgrade(database)
        environment = {
            **os.environ,
            "PATH": search_path(),
            "WATCHSTEP_STORE": "s3://runs/some/prefix",
            "WATCHSTEP_DATABASE_URL": database_url,
            "WATCHSTEP_BROKER_URL": broker.url,
            "WATCHSTEP_PUBLIC_URL": f"http://127.0.0.1:{port}",
            "WATCHSTEP_SWEEP_SECONDS": "0.5",
            "WATCHSTEP_LISTING_SECONDS": "0.5",
            "WATCHSTEP_GRACE_SECONDS": "0.5",
            "WATCHSTEP_LOCAL_JOBS": "true",
            "WATCHSTEP_ALLOWED_ADDRESSES": "loopback",
            "WATCHSTEP_LOG": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        }
        yield Production(
            environment,
            tmp_path,
            f"http://127.0.0.1:{port}",
            create_token(database, "operator"),
            create_token(database, "recorder", PROJECT),
            broker,
            collector,
            f"http://127.0.0.1:{free_port()}/metrics",
        )


def sample(figures: str, name: str) -> float:
    """The value of one line of what Prometheus reads."""
    (line,) = [line for line in figures.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def check_one_trace(production: Production) -> None:
    """From the announcement to the stop, over three processes."""
    stops = production.collector.named("watchstep.stop")
    (stopped,) = [span for span in stops if span.attributes["watchstep.outcome"] == "done"]
    evaluated = [s for s in production.collector.named("watchstep.evaluate") if s.span == stopped.parent]
    announced = [s for s in production.collector.named("watchstep.announce") if s.span == evaluated[0].parent]
    assert {span.trace for span in (*evaluated, *announced)} == {stopped.trace}
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
    production: Production, receiver: Receiver, tmp_path: Path
) -> None:
    backend = Local()
    job = launch(backend, tmp_path, STUBBORN)
    recording = Recording(Store.open(production.environment["WATCHSTEP_STORE"])).begin(on_stop="raise")
    with production.api(), production.workers():
        bound = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
        production.client(production.operator).register({"run": "run-1", "attempt": "a1", "job": bound})
        told = {"rule": "nan_or_inf", "name": "told", "actions": [{"webhook": receiver.url}]}
        recorder = production.client(production.recorder)
        recorder.register({"run": "run-1", "attempt": "a1", "rules": [told]})
        receiver.answers = [500]
        assert recorder.announce("run-1", recording.write(0, 0, 3), {}) == ControlDocument()
        recorder.announce("run-1", recording.write(1, 4, 7, nan_from(6)), {"dropped": 0})
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
        recorder.announce("run-1", recording.write(0, 0, 3, nan_from(2)), {})
        production.broker.client.flushall()
        recording.write(1, 4, 7, nan_from(2))  # and this one nobody announced
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
        body = {"runs": ["run-*"], "rules": [{"rule": "nan_or_inf"}], "sweep": ["max_elements=0,1"]}
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
